"""Query strings: the same checks as for bodies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from facade.translate.fields import Choice, Integer, Text, refuse
from facade.translate.record import Field, Record, record

_TOLERATED: Final = {"include[]": "No effect.", "include": "No effect.", "include_obfuscation": "No effect."}
_NUMBERS: Final = frozenset({"expires", "limit", "starting_after"})
_MOST_DIGITS: Final = 17
_RETRIEVE = record(
    [
        Field("stream", Choice(("true", "false")), "Whether events are sent."),
        Field("starting_after", Integer(0, 2**31 - 1), "Events with higher numbers only."),
    ],
    _TOLERATED,
)
_ITEMS = record(
    [
        Field("limit", Integer(1, 100), "Items of a page; absent means 20."),
        Field("order", Choice(("asc", "desc")), "Oldest first or newest first; absent means desc."),
        Field("after", Text(1, 128), "The item after which the page begins."),
    ],
    _TOLERATED,
)


@dataclass(frozen=True, slots=True)
class Retrieve:
    """How a response is told. `starting_after`: -1 for all events."""

    stream: bool
    starting_after: int


@dataclass(frozen=True, slots=True)
class InputItems:
    """Which items are told."""

    limit: int
    ascending: bool
    after: str | None


def read_retrieve_query(query: Iterable[tuple[str, str]]) -> Retrieve:
    """Read the query of a retrieval; DomainError invalid_request names the parameter at fault."""
    values = read_query(_RETRIEVE, query)
    stream = values.get("stream") == "true"
    if "starting_after" in values and not stream:
        refuse("starting_after", "is only allowed when 'stream' is true")
    return Retrieve(stream, values.get("starting_after", -1))


def read_input_items_query(query: Iterable[tuple[str, str]]) -> InputItems:
    """Read the query of a list of items; DomainError invalid_request names the parameter at fault."""
    values = read_query(_ITEMS, query)
    return InputItems(values.get("limit", 20), values.get("order") == "asc", values.get("after"))


def read_query(table: Record, query: Iterable[tuple[str, str]]) -> Mapping[str, Any]:
    """Read a query's pairs; of a name that is there twice the last counts. Numbers are written in digits."""
    return table.read({name: _value(name, text) for name, text in query}, "")


def _value(name: str, text: str) -> str | int:
    return int(text[:_MOST_DIGITS]) if name in _NUMBERS and text.isascii() and text.isdecimal() else text
