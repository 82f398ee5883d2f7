"""Items of /v1/responses: what callers send and what is stored, in one form, and the chat that they make.

The same form is told by /input_items, kept by jobs, and read back for a conversation that goes on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from facade.translate.failures import Place
from facade.translate.fields import Choice, Custom, ListOf, Schema, Text, refuse, wrong_type
from facade.translate.messages import FUNCTION_NAME, read_image, unsupported
from facade.translate.record import Field, Record, record
from omniserve.llm.v1 import llm_pb2

Item = dict[str, Any]
Places = Callable[[int], str]

MOST_ITEMS: Final = 10_000
_ID_FORM: Final = r"[A-Za-z0-9._:-]{1,128}"
_ROLES: Final = ("user", "system", "developer", "assistant")
_STATUS: Final = {"status": "Without effect: what is sent is complete.", "phase": "Without effect."}
_ID: Final = Field("id", Text(1, 128, _ID_FORM), "Its id; absent means one of ours.")


def _typed(kind: str, *fields: Field, tolerated: Mapping[str, str] = {}, required: bool = True) -> Record:
    return record([Field("type", Choice((kind,)), f"Always {kind}.", required=required), *fields], tolerated)


_INPUT_TEXT = _typed("input_text", Field("text", Text(), "What is said.", required=True))
_OUTPUT_TEXT = _typed(
    "output_text",
    Field("text", Text(), "What was said.", required=True),
    tolerated={"annotations": "Without effect.", "logprobs": "Without effect."},
)
_REFUSAL = _typed("refusal", Field("refusal", Text(), "What was said instead of an answer.", required=True))
_IMAGE = _typed(
    "input_image",
    Field("image_url", Text(1), "A data: URL with the image in base64.", required=True),
    tolerated={"detail": "Without effect.", "file_id": "Only null."},
)
_SAID: Final = {"input_text": _INPUT_TEXT, "input_image": _IMAGE}
_ANSWERED: Final = {"output_text": _OUTPUT_TEXT, "refusal": _REFUSAL, "input_text": _INPUT_TEXT}


def _read_content(parts: Mapping[str, Record], value: object, path: str) -> list[Item]:
    if isinstance(value, str):
        return [_read_part(parts, {"type": next(iter(parts)), "text": value}, path)]
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of content parts", value)
    if not value:
        refuse(path, "must have at least 1 item", code="array_below_min_length")
    return [_read_part(parts, part, f"{path}[{index}]") for index, part in enumerate(value)]


def _read_part(parts: Mapping[str, Record], value: object, path: str) -> Item:
    if not isinstance(value, dict):
        wrong_type(path, "an object", value)
    kind = value.get("type")
    if kind in ("input_file", "input_audio"):
        unsupported(f"{path}.type", f"'{kind}' is not supported; send its text as input_text")
    name = Choice(tuple(parts)).read(kind, f"{path}.type")
    part = {"type": name, **parts[name].read({k: v for k, v in value.items() if k != "prompt_cache_breakpoint"}, path)}
    if name == "input_image":
        return part | {"detail": "auto"}
    return part | {"annotations": [], "logprobs": []} if name == "output_text" else part


def _content_schema(parts: Mapping[str, Record]) -> Schema:
    several = {"type": "array", "minItems": 1, "items": {"oneOf": [part.schema() for part in parts.values()]}}
    return {"oneOf": [{"type": "string"}, several]}


_ALL_PARTS: Final = {**_SAID, **_ANSWERED}
_MESSAGE = _typed(
    "message",
    _ID,
    Field("role", Choice(_ROLES), "Who speaks.", required=True),
    Field("content", Custom(lambda value, _: value, _content_schema(_ALL_PARTS)), "What is said.", required=True),
    tolerated=_STATUS,
    required=False,
)
_CALL = _typed(
    "function_call",
    _ID,
    Field("call_id", Text(1, 256), "Identifies the call.", required=True),
    Field("name", FUNCTION_NAME, "The function.", required=True),
    Field("arguments", Text(), "Its arguments as JSON text.", required=True),
    tolerated={**_STATUS, "namespace": "Without effect.", "caller": "Without effect."},
)
_OUTPUT = _typed(
    "function_call_output",
    _ID,
    Field("call_id", Text(1, 256), "The call it answers.", required=True),
    Field("output", Custom(lambda value, _: value, _content_schema(_SAID)), "The answer.", required=True),
    tolerated={**_STATUS, "name": "Without effect.", "namespace": "Without effect.", "caller": "Without effect."},
)
_THOUGHT = record(
    [
        Field("type", Choice(("reasoning_text", "summary_text")), "Which of the two.", required=True),
        Field("text", Text(), "", required=True),
    ]
)
_REASONING = _typed(
    "reasoning",
    _ID,
    Field("summary", ListOf(_THOUGHT), "What it thought, in short."),
    Field("content", ListOf(_THOUGHT), "What it thought."),
    tolerated={**_STATUS, "encrypted_content": "Without effect."},
)
_KINDS: Final = {
    "message": _MESSAGE,
    "function_call": _CALL,
    "function_call_output": _OUTPUT,
    "reasoning": _REASONING,
}


def read_input(value: object, path: str) -> list[Item]:
    """Read a text or an array of items; those without an id of their own have none yet."""
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}])]
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of items", value)
    if not 1 <= len(value) <= MOST_ITEMS:
        refuse(path, f"must have 1 to {MOST_ITEMS} items, not {len(value)}")
    return [_read_item(item, f"{path}[{index}]") for index, item in enumerate(value)]


def _read_item(value: object, path: str) -> Item:
    if not isinstance(value, dict):
        wrong_type(path, "an object", value)
    kind = value.get("type") or ("message" if "role" in value else None)
    if isinstance(kind, str) and kind not in _KINDS:
        unsupported(f"{path}.type", f"'{kind[:60]}' is not supported; {', '.join(_KINDS)} are")
    item = _KINDS[Choice(tuple(_KINDS)).read(kind, f"{path}.type")].read(value, path)
    given = {"id": item["id"]} if "id" in item else {}
    if kind == "message":
        parts = _ANSWERED if item["role"] == "assistant" else _SAID
        return _message(item["role"], _read_content(parts, item["content"], f"{path}.content")) | given
    if kind == "function_call_output":
        output = item["output"]
        read = output if isinstance(output, str) else _read_content(_SAID, output, f"{path}.output")
        return {"type": kind, "call_id": item["call_id"], "output": read, "status": "completed"} | given
    if kind == "function_call":
        return {"type": kind, **{n: item[n] for n in ("call_id", "name", "arguments")}, "status": "completed"} | given
    return {"type": kind, "summary": item.get("summary", []), "content": item.get("content", [])} | given


def _message(role: str, content: list[Item]) -> Item:
    if role == "assistant":
        content = [
            {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
            if part["type"] == "input_text"
            else part
            for part in content
        ]
    return {"type": "message", "role": role, "status": "completed", "content": content}


INPUT_SCHEMA: Final[Schema] = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"oneOf": [kind.schema() for kind in _KINDS.values()]}},
    ]
}
_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def item_id(kind: str, token: str, place: str) -> str:
    """Return the id of an item of the response that `token` stands for."""
    return f"{_PREFIXES[kind]}_{token}_{place}"


def with_ids(items: Sequence[Item], token: str) -> list[Item]:
    """Return items that have an id each, no two the same."""
    seen: set[str] = set()
    found = []
    for place, item in enumerate(items):
        identity = item.get("id", "")
        if not identity or identity in seen:
            identity = item_id(item["type"], token, f"i{place}")
        seen.add(identity)
        found.append({"id": identity, **item} if "id" not in item else {**item, "id": identity})
    return found


@dataclass(slots=True)
class Conversation:
    """Messages of the contract made of items, each with where it comes from.

    What the model said in a row (thoughts, text, calls) becomes one turn: that is how chat templates know it.
    """

    messages: list[llm_pb2.Message] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    def instruct(self, text: str) -> None:
        """Begin with instructions."""
        self._say("system", "instructions", [{"type": "input_text", "text": text}], "instructions")

    def add(self, items: Iterable[Item], place: Places) -> None:
        """Add items; `place` tells where the n-th comes from."""
        for index, item in enumerate(items):
            path = place(index)
            kind = item["type"]
            if kind == "message" and item["role"] != "assistant":
                self._say(item["role"], path, item["content"], f"{path}.content")
            elif kind == "function_call_output":
                output = item["output"]
                parts = [{"type": "input_text", "text": output}] if isinstance(output, str) else output
                self._say("tool", path, parts, f"{path}.output")
                self.messages[-1].tool_call_id = item["call_id"]
            else:
                self._answer(item, path)

    def _say(self, role: str, path: str, parts: Sequence[Item], content: str) -> None:
        paths = [f"{content}[{index}]" for index in range(len(parts))]
        made = [_part(part, place) for part, place in zip(parts, paths, strict=True)]
        self.messages.append(llm_pb2.Message(role=role, content=made))
        self.places.append(Place(path, tuple(paths)))

    def _answer(self, item: Item, path: str) -> None:
        last = self.messages[-1] if self.messages else None
        kind = item["type"]
        fits = last is not None and last.role == "assistant" and _continues(last, kind)
        if last is None or not fits:
            last = llm_pb2.Message(role="assistant")
            self.messages.append(last)
            self.places.append(Place(path))
        if kind == "reasoning":
            last.reasoning = "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        elif kind == "function_call":
            last.tool_calls.add(id=item["call_id"], name=item["name"], arguments_json=item["arguments"])
        else:
            last.content.extend(
                llm_pb2.ContentPart(text=part.get("text", part.get("refusal"))) for part in item["content"]
            )


def _continues(turn: llm_pb2.Message, kind: str) -> bool:
    """Whether an item of this kind belongs to the turn of the model so far."""
    if kind == "function_call":
        return True
    return kind == "message" and not turn.content and not turn.tool_calls


def _part(part: Item, path: str) -> llm_pb2.ContentPart:
    if part["type"] == "input_image":
        return llm_pb2.ContentPart(media=read_image(part["image_url"], f"{path}.image_url"))
    return llm_pb2.ContentPart(text=part["text"])
