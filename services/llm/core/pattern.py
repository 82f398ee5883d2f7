"""Regular expressions and formats of JSON schema as GBNF: what may stand between the quotes of a JSON string.

Python's own parser reads the expression; what no grammar can express (looking around, back references) is refused.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import MappingProxyType
from typing import Any, Final

from services.llm.core.gbnf import (
    EVERY,
    MOST_REPEATS,
    Ranges,
    Rules,
    either,
    literal,
    normal,
    one_of,
    repeated,
    without,
)

MOST_CHARACTERS: Final = 1000

_ESCAPES: Final[Mapping[int, str]] = MappingProxyType(
    {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
)
_NOT_PLAIN: Final[Ranges] = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_HEX: Final = "[0-9a-fA-F]"
# An escaped half of a surrogate pair is JSON, but no character: many parsers refuse it.
_UNICODE: Final = f'"u" ([0-9a-cA-CefEF] {_HEX}{{3}} | [dD] [0-7] {_HEX}{{2}})'
ANY_CHARACTER: Final = f'{one_of(_NOT_PLAIN, but=True)} | "\\\\" (["\\\\/bfnrt] | {_UNICODE})'
"""The body of a rule for one character of a JSON string, however it is written."""

_DIGITS: Final[Ranges] = ((0x30, 0x39),)
_SPACES: Final[Ranges] = ((0x09, 0x0D), (0x20, 0x20))
_WORD: Final[Ranges] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_LINE_END: Final[Ranges] = ((0x0A, 0x0A),)

_DATE: Final = (
    r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
)
_TIME: Final = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE: Final = r"(25[0-5]|2[0-4]\d|1\d{2}|[1-9]?\d)"
_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "date": f"^{_DATE}$",
        "time": f"^{_TIME}$",
        "date-time": f"^{_DATE}T{_TIME}$",
        "duration": r"^P(\d{1,4}W|\d{1,4}D|(\d{1,4}D)?T(\d{1,4}H(\d{1,4}M)?(\d{1,4}S)?|\d{1,4}M(\d{1,4}S)?|\d{1,4}S))$",
        "email": rf"^[a-zA-Z0-9_+-]{{1,32}}(\.[a-zA-Z0-9_+-]{{1,32}}){{0,3}}@({_LABEL}\.){{1,3}}[a-z]{{2,10}}$",
        "hostname": rf"^({_LABEL}\.){{0,4}}{_LABEL}$",
        "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
        "ipv6": r"^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
        "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    }
)
"""Formats that a grammar can hold, as expressions; each allows a part of what the format does, never more."""

Items = Sequence[tuple[Any, Any]]


class PatternError(Exception):
    """An expression that is broken, or that no grammar can express; the message continues after its name."""


def any_character(rules: Rules) -> str:
    """Return the rule of one character of a JSON string."""
    return rules.add(ANY_CHARACTER)


def inside_quotes(rules: Rules, expression: str) -> str:
    """Return what JSON strings have between their quotes when an expression is found in them. Raises PatternError."""
    if len(expression) > MOST_CHARACTERS:
        raise PatternError(f"has {len(expression)} characters; at most {MOST_CHARACTERS} are possible")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about expressions that a later Python may read differently
            parsed = parser.parse(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"is no regular expression: {error}") from None
    if parsed.state.flags & (re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.ASCII | re.LOCALE):
        raise PatternError("sets flags, which a grammar cannot express")
    items = list(parsed)
    anything = repeated(any_character(rules), 0, None)
    begins = bool(items) and items[0] == (ops.AT, ops.AT_BEGINNING)
    try:
        found = _Translation(rules, anything).tail(items[1:] if begins else items)
    except RecursionError:
        raise PatternError("is nested too deep") from None
    return found if begins else f"{anything} {found}"


class _Translation:
    def __init__(self, rules: Rules, anything: str) -> None:
        self._rules = rules
        self._anything = anything

    def tail(self, items: Items) -> str:
        """Return the end of an expression: without `$`, anything may follow."""
        if not items:
            return self._anything
        operator, value = items[-1]
        if operator is ops.AT and value in (ops.AT_END, ops.AT_END_STRING):
            return self._sequence(items[:-1])
        alternatives = self._alternatives(operator, value)
        if alternatives is None:
            return f"{self._sequence(items)} {self._anything}"
        return f"{self._sequence(items[:-1])} {either(self.tail(list(each)) for each in alternatives)}"

    @staticmethod
    def _alternatives(operator: Any, value: Any) -> Sequence[Items] | None:  # noqa: ANN401 - the parser's own
        """Return the alternatives of an item in which an expression may end."""
        if operator is ops.BRANCH:
            return value[1]  # type: ignore[no-any-return]
        if operator is ops.SUBPATTERN and not value[1] and not value[2]:
            return [list(value[3])]
        return None

    def _sequence(self, items: Items) -> str:
        return " ".join(self._item(operator, value) for operator, value in items) or '""'

    def _item(self, operator: Any, value: Any) -> str:  # noqa: ANN401 - the parser's own
        if operator in (ops.LITERAL, ops.NOT_LITERAL, ops.IN, ops.ANY):
            return _character(_set(operator, value))
        if operator in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            return self._repeat(*value)
        if operator is ops.SUBPATTERN and not value[1] and not value[2]:
            return f"({self._sequence(value[3])})"
        if operator is ops.BRANCH:
            return either(self._sequence(each) for each in value[1])
        if operator is ops.AT:
            raise PatternError("has an anchor elsewhere than at its ends")
        raise PatternError(f"uses {str(operator).lower().replace('_', ' ')}, which a grammar cannot express")

    def _repeat(self, least: int, most: Any, items: Items) -> str:  # noqa: ANN401 - an integer or the parser's MAXREPEAT
        bound = None if most is ops.MAXREPEAT else int(most)
        if max(least, bound or 0) > MOST_REPEATS:
            raise PatternError(f"repeats {max(least, bound or 0)} times; at most {MOST_REPEATS} are possible")
        low, _ = items.getwidth()  # type: ignore[attr-defined]
        if bound is None and low == 0:
            raise PatternError("repeats without an end what may be empty")
        return repeated(self._rules.add(self._sequence(items)), least, bound)


def _set(operator: Any, value: Any) -> Ranges:  # noqa: ANN401 - the parser's own
    if operator is ops.ANY:
        return without(EVERY, _LINE_END)
    if operator is ops.LITERAL:
        return ((value, value),)
    if operator is ops.NOT_LITERAL:
        return without(EVERY, ((value, value),))
    members = [item for item in value if item[0] is not ops.NEGATE]
    found = normal(each for kind, content in members for each in _member(kind, content))
    return without(EVERY, found) if len(members) < len(value) else found


def _member(kind: Any, content: Any) -> Ranges:  # noqa: ANN401 - the parser's own
    if kind is ops.LITERAL:
        return ((content, content),)
    if kind is ops.RANGE:
        return (content,)
    classes = {
        ops.CATEGORY_DIGIT: _DIGITS,
        ops.CATEGORY_SPACE: _SPACES,
        ops.CATEGORY_WORD: _WORD,
        ops.CATEGORY_NOT_DIGIT: without(EVERY, _DIGITS),
        ops.CATEGORY_NOT_SPACE: without(EVERY, _SPACES),
        ops.CATEGORY_NOT_WORD: without(EVERY, _WORD),
    }
    return classes[content]


def _character(ranges: Ranges) -> str:
    """Return one character of a set as JSON writes it."""
    plain = without(ranges, (*_NOT_PLAIN, (0xD800, 0xDFFF)))
    escaped = [mark for code, mark in _ESCAPES.items() if any(low <= code <= high for low, high in ranges)]
    options = [*([one_of(plain)] if plain else []), *(literal("\\" + mark) for mark in escaped)]
    if not options:
        raise PatternError("asks for characters that a JSON string does not have")
    return options[0] if len(options) == 1 else either(options)
