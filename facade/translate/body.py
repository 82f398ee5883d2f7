"""The request body: bytes in, one JSON object out."""

import json
import math
from typing import Any

import orjson

from facade.translate.fields import children_of, refuse, wrong_type

BODY = "body"
# Beyond this size nobody reads a body twice only to name the field at fault.
_LOCATE_UP_TO_BYTES = 1 << 20


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body into its JSON object; DomainError invalid_request says what is wrong and where."""
    if not body.strip():
        refuse(BODY, "is empty; a JSON object is expected", code="invalid_json")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        _explain(body, error)
    if not isinstance(value, dict):
        wrong_type(BODY, "a JSON object", value)
    return value


def _explain(body: bytes, error: orjson.JSONDecodeError) -> None:
    """Refuse a body that is no JSON: by its encoding, by the number JSON does not have, or by the parser's words."""
    try:
        text = body.decode()
    except UnicodeDecodeError as where:
        refuse(BODY, f"is not valid UTF-8: byte {body[where.start]:#04x} at offset {where.start}", code="invalid_json")
    if len(text) <= _LOCATE_UP_TO_BYTES:
        path = _path_of_non_finite(text)
        if path is not None:
            refuse(path or BODY, "must be a finite number: JSON has no NaN and no Infinity")
    refuse(BODY, f"is not valid JSON: {error}", code="invalid_json")


def _path_of_non_finite(text: str) -> str | None:
    """Path of the first NaN or infinite number, or None; Python's own parser accepts them where JSON does not."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    level: list[tuple[str, object]] = [("", value)]
    while level:
        for path, item in level:
            if isinstance(item, float) and not math.isfinite(item):
                return path
        level = [child for path, item in level for child in _members(path, item)]
    return None


def _members(path: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"{path}.{name}" if path else str(name)[:60], item) for name, item in value.items()]
    return [(f"{path}[{index}]", item) for index, item in enumerate(children_of(value))]
