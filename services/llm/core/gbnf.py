"""GBNF, llama.cpp's notation for grammars: rules under construction, literals, character sets, and a look at a caller's grammar.

The notation is described in llama.cpp's grammars/README.md.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from services.kit.errors import DomainError, Reason

MOST_BYTES: Final = 256 * 1024
MOST_REPEATS: Final = 2000
"""llama.cpp refuses larger bounds of a repetition, or reads them as no bound at all."""
MOST_NESTED: Final = 64

LAST_CHARACTER: Final = 0x10FFFF
SURROGATES: Final = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]
"""Sets of characters: first and last code points, ascending, apart from each other."""

EVERY: Final[Ranges] = ((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST_CHARACTER))


class GrammarSizeError(Exception):
    """A grammar under construction became too large."""


class Rules:
    """A grammar under construction: equal bodies share one rule. Raises GrammarSizeError."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._count = 0
        self._size = 0
        self._most_bytes = most_bytes

    def reserve(self) -> str:
        """Return the name of a rule that is defined later."""
        self._count += 1
        return f"r{self._count}"

    def define(self, name: str, body: str) -> None:
        """Say what a rule is."""
        self._size += len(name) + len(body.encode()) + 6
        if self._size > self._most_bytes:
            raise GrammarSizeError(f"its grammar is longer than {self._most_bytes} bytes")
        self._bodies[name] = body

    def add(self, body: str) -> str:
        """Return the name of the rule with this body."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = self.reserve()
            self.define(name, body)
        return name

    def text(self, root: str) -> str:
        """Return the grammar; `root`: what the whole text has to be."""
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]) + "\n"


def literal(text: str) -> str:
    """Return the symbol of a fixed text."""
    return '"' + "".join(_escaped(ord(character), '"\\') for character in text) + '"'


def one_of(ranges: Ranges, *, but: bool = False) -> str:
    """Return the symbol of one character of a set, or of any `but` those."""
    special = "\\]-^["
    parts = [
        _escaped(low, special) if low == high else f"{_escaped(low, special)}-{_escaped(high, special)}"
        for low, high in ranges
    ]
    return f"[{'^' if but else ''}{''.join(parts)}]"


def _escaped(code: int, special: str) -> str:
    character = chr(code)
    if 0x20 <= code < 0x7F and character not in special:
        return character
    if code < 0x100:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def repeated(symbol: str, least: int, most: int | None) -> str:
    """Return a symbol repeated `least` to `most` times; None is as often as one likes."""
    if (least, most) == (1, 1):
        return symbol
    if most is None:
        return f"{symbol}*" if least == 0 else f"{symbol}{{{least},}}"
    return f"{symbol}{{{least},{most}}}"


def either(options: Iterable[str]) -> str:
    """Return a choice, in brackets."""
    return f"({' | '.join(options)})"


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in ascending order, overlapping and adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """Return what is in the first set and not in the second."""
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        start = low
        for first, last in taken:
            if last < start or first > high:
                continue
            if first > start:
                found.append((start, first - 1))
            start = last + 1
        if start <= high:
            found.append((start, high))
    return tuple(found)


def through(rules: Rules, marker: str) -> str:
    """Return the rule of a text that ends where `marker` first does: the automaton of Knuth, Morris and Pratt as rules."""
    states = [rules.reserve() for _ in marker]
    letters = sorted(set(marker))
    other = one_of(normal((ord(letter), ord(letter)) for letter in letters), but=True)
    for place, state in enumerate(states):
        steps = [f"{other} {states[0]}"]
        for letter in letters:
            reached = _reached(marker, place, letter)
            steps.append(literal(letter) if reached == len(marker) else f"{literal(letter)} {states[reached]}")
        rules.define(state, " | ".join(steps))
    return states[0]


def _reached(marker: str, place: int, letter: str) -> int:
    """Return how much of the marker the text ends with after `letter`, having ended with `place` characters of it."""
    seen = marker[:place] + letter
    return next(length for length in range(len(seen), -1, -1) if seen.endswith(marker[:length]))


def check_grammar(text: str, field: str) -> None:
    """Refuse what must not come near llama.cpp's parser. Raises DomainError `invalid_request`.

    The parser calls itself for every open bracket, and a grammar that it does not understand may end its process.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > MOST_BYTES:
        raise _refusal(field, f"has {size} bytes; at most {MOST_BYTES} are allowed")
    if "\0" in text:
        raise _refusal(field, "contains a zero character")
    if "::=" not in text:
        raise _refusal(field, 'has no rule: a rule looks like root ::= "yes" | "no"')
    depth, tokens = _outline(text)
    if depth > MOST_NESTED:
        raise _refusal(field, f"nests brackets more than {MOST_NESTED} deep")
    if tokens:
        raise _refusal(field, "names tokens with '<'; only characters can be asked for")


def _outline(text: str) -> tuple[int, bool]:
    """Return how deep round brackets are nested, and whether tokens are named, outside of literals, sets and comments."""
    depth = deepest = 0
    tokens = False
    closing = ""
    skip = False
    for character in text:
        if skip:
            skip = False
        elif closing:
            skip = character == "\\" and closing != "\n"
            closing = "" if character == closing else closing
        elif character in '"[#':
            closing = {'"': '"', "[": "]", "#": "\n"}[character]
        elif character in "()":
            depth += 1 if character == "(" else -1
            deepest = max(deepest, depth)
        tokens = tokens or (character == "<" and not closing)
    return deepest, tokens


def _refusal(field: str, sentence: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, f"'{field}' {sentence}", field=field)


def digits_between(low: int, high: int | None, most_digits: int) -> list[str]:
    """Return the alternatives whose texts are the numbers from `low` (0 or more) to `high`, without leading zeros.

    `high` None: any number of up to `most_digits` digits.
    """
    last = 10**most_digits - 1 if high is None else high
    found = []
    for length in range(len(str(low)), len(str(last)) + 1):
        least, most = (0 if length == 1 else 10 ** (length - 1)), 10**length - 1
        first, end = max(low, least), min(last, most)
        if first <= end:
            found += [" ".join(parts) for parts in _same_length(str(first), str(end))]
    return found


def _same_length(low: str, high: str) -> list[list[str]]:
    """Return sequences of symbols for the digits between two numbers of the same length."""
    if not low:
        return [[]]
    rest = len(low) - 1
    if set(low) == {"0"} and set(high) == {"9"}:
        return [[repeated("[0-9]", len(low), len(low))]]
    if low[0] == high[0]:
        return [[literal(low[0]), *parts] for parts in _same_length(low[1:], high[1:])]
    found: list[list[str]] = []
    first, last = int(low[0]), int(high[0])
    if rest and set(low[1:]) != {"0"}:
        found += [[literal(low[0]), *parts] for parts in _same_length(low[1:], "9" * rest)]
        first += 1
    end: Sequence[list[str]] = ()
    if rest and set(high[1:]) != {"9"}:
        end = [[literal(high[0]), *parts] for parts in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        middle = [one_of(((ord(str(first)), ord(str(last))),))]
        found.append(middle + ([repeated("[0-9]", rest, rest)] if rest else []))
    return [*found, *end]
