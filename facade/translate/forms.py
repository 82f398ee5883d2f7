"""Forms: the parts of a multipart body become the values that a JSON body would have."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from facade.translate.fields import Choice, Text, refuse
from facade.translate.record import Record

MOST_PARTS: Final = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a form. `is_file`: it came with a file name or as something else than text."""

    name: str
    data: bytes
    is_file: bool


def form_values(table: Record, parts: Iterable[Part]) -> dict[str, Any]:
    """Return the values of a form by name, for `table` to read: files as bytes, numbers and objects as JSON has them.

    A name that is there more than once, or ends in [], is an array. DomainError invalid_request names the field at fault.
    """
    found: dict[str, list[Any]] = {}
    arrays: set[str] = set()
    for part in parts:
        name = part.name.removesuffix("[]")
        if name != part.name:
            arrays.add(name)
        found.setdefault(name, []).append(part.data if part.is_file else _text_value(table, name, part.data))
    return {name: each if len(each) > 1 or name in arrays else each[0] for name, each in found.items()}


def _text_value(table: Record, name: str, data: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        refuse(name[:60], f"is not valid UTF-8: byte {data[error.start]:#04x} at offset {error.start}")
    field = table.fields.get(name)
    if field is None or isinstance(field.reader, Text | Choice):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text  # the field's own reader says what it should have been
