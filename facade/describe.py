"""The published description of the API: parts of /openapi.json, and /docs as one page that needs nothing from elsewhere."""

import html
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "reason", "request_id"],
            "properties": {
                "message": {"type": "string", "description": "A sentence with the numbers."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": "string"},
                "reason": {"type": "string", "description": "Constant; what to match on."},
                "request_id": {"type": "string", "description": "Also in the header x-request-id."},
                "retry_after_ms": {"type": "integer", "description": "When to come back, milliseconds."},
            },
        }
    },
}


def json_body(schema: Schema) -> dict[str, Any]:
    """Return the description of a JSON request body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def json_or_form(json_schema: Schema, form_schema: Schema) -> dict[str, Any]:
    """Return the description of a request body that is JSON or a form."""
    content = {"application/json": {"schema": json_schema}, "multipart/form-data": {"schema": form_schema}}
    return {"requestBody": {"required": True, "content": content}}


def path_parameter(name: str, sentence: str) -> dict[str, Any]:
    """Return the description of a part of the path."""
    schema = {"type": "string"}
    return {"parameters": [{"name": name, "in": "path", "required": True, "description": sentence, "schema": schema}]}


def parameters(name: str, sentence: str, query: Schema) -> dict[str, Any]:
    """Return the description of a part of the path and of the query."""
    required = query.get("required", ())
    found = [
        {
            "name": each,
            "in": "query",
            "required": each in required,
            "description": schema.get("description", ""),
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for each, schema in query["properties"].items()
    ]
    return {"parameters": [*path_parameter(name, sentence)["parameters"], *found]}


def file_answers(media_types: Iterable[str]) -> dict[int | str, dict[str, Any]]:
    """Return the description of a route that sends a file."""
    content = {each: {"schema": {"type": "string", "format": "binary"}} for each in media_types}
    return {**answers("the file"), 200: {"description": "The file.", "content": content}}


def answers(what: str, *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the description of a route's answers."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failure = {
        "description": "Refused or failed, in OpenAI's shape.",
        "content": {"application/json": {"schema": _ERROR}},
    }
    return {200: {"description": f"{what}.", "content": content}, "default": failure}


_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h2{margin-top:2.5rem;border-top:1px solid #ddd;padding-top:1rem}code,pre{font-family:ui-monospace,monospace;font-size:.9em}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #eee}
pre{background:#f5f5f5;padding:.75rem;overflow:auto}.m{display:inline-block;min-width:3.5rem;font-weight:600}
@media(prefers-color-scheme:dark){body{color:#eee;background:#161616}h2,td,th{border-color:#333}pre{background:#222}a{color:#8ab4f8}}
"""
_EXAMPLE: Final = """curl http://127.0.0.1:8791/v1/chat/completions -H 'content-type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'"""


def docs_page(openapi: Schema) -> str:
    """Return the API's description as one HTML page."""
    title = html.escape(f"{openapi['info']['title']} {openapi['info']['version']}")
    sections = "".join(
        _section(path, method, operation)
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><h1>{title}</h1>'
        f"<p>{html.escape(openapi['info'].get('description', ''))} "
        f'The same for machines: <a href="openapi.json">openapi.json</a>.</p><pre>{html.escape(_EXAMPLE)}</pre>'
        f"{sections}</body></html>"
    )


def _section(path: str, method: str, operation: Schema) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    rows = "".join(_rows(body)) if body else ""
    table = f"<table><tr><th>field</th><th>type</th><th>meaning</th></tr>{rows}</table>" if rows else ""
    answer = html.escape(operation["responses"]["200"]["description"])
    return (
        f'<h2><span class="m">{method.upper()}</span> <code>{html.escape(path)}</code></h2>'
        f"<p>{html.escape(operation.get('summary', ''))}. Answer: {answer}</p>{table}"
    )


def _rows(schema: Schema) -> Iterator[str]:
    required = schema.get("required", ())
    for name, each in schema["properties"].items():
        mark = " <b>required</b>" if name in required else ""
        meaning = html.escape(each.get("description", ""))
        yield (
            f"<tr><td><code>{html.escape(name)}</code>{mark}</td><td>{html.escape(_type(each))}</td>"
            f"<td>{meaning}</td></tr>"
        )


def _type(schema: Schema) -> str:
    """Return a field's type with its bounds, in words."""
    if "oneOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["oneOf"]))
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    bounds = f" {low:g} to {high:g}" if low is not None and high is not None and high < 2**31 - 1 else ""
    return f"{schema.get('type', 'any')}{bounds}"
