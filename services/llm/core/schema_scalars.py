"""Strings and numbers of JSON schemas as GBNF, and how places in a schema are named when something is wrong there."""

from collections.abc import Callable
from typing import Any, Final

from services.llm.core import pattern
from services.llm.core.gbnf import MOST_REPEATS, Rules, digits_between, either, repeated

Schema = dict[str, Any]

_MOST_DIGITS: Final = 16
_INTEGRAL: Final = f'("0" | [1-9] [0-9]{{0,{_MOST_DIGITS - 1}}})'
_FRACTION: Final = f'("." [0-9]{{1,{_MOST_DIGITS}}})? ([eE] [-+]? [0-9]{{1,2}})?'
ANY_INTEGER: Final = f'"-"? {_INTEGRAL}'
ANY_NUMBER: Final = f'"-"? {_INTEGRAL} {_FRACTION}'
OF_NUMBERS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
"""Keywords about numbers."""


class SchemaError(Exception):
    """A schema that is broken or cannot be enforced. `path`: the place inside it, "" for its top."""

    def __init__(self, path: str, why: str, *, inexpressible: bool = False) -> None:
        super().__init__(why)
        self.path = path
        self.why = why
        self.inexpressible = inexpressible


def at(path: str, keyword: str) -> str:
    """Return the path of a keyword at a place."""
    return f"{path}.{keyword}" if path else keyword


class Scalars:
    """Adds the rules of strings and numbers. `cannot` is told a place and why it cannot be expressed; it raises, or does not."""

    def __init__(self, rules: Rules, cannot: Callable[[str, str], None]) -> None:
        self._rules = rules
        self._cannot = cannot

    def bounds(self, schema: Schema, suffix: str, path: str) -> tuple[int, int | None]:
        """Return how many there are at least and at most. Raises SchemaError."""
        least, most = schema.get(f"min{suffix}", 0), schema.get(f"max{suffix}")
        for keyword in (f"min{suffix}", f"max{suffix}"):
            value = schema.get(keyword, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise SchemaError(at(path, keyword), "must be a whole number, 0 or more")
        if most is not None and most < least:
            raise SchemaError(at(path, f"max{suffix}"), f"is {most}, below 'min{suffix}', {least}")
        if least > MOST_REPEATS:
            raise SchemaError(
                at(path, f"min{suffix}"), f"is {least}; at most {MOST_REPEATS} can be enforced", inexpressible=True
            )
        if most is not None and most > MOST_REPEATS:
            self._cannot(at(path, f"max{suffix}"), f"is {most}; at most {MOST_REPEATS} can be enforced")
            most = None
        return least, most

    def any_text(self) -> str:
        """Return the symbol of any string."""
        return self._rules.add(f'"\\"" {repeated(pattern.any_character(self._rules), 0, None)} "\\""')

    def string(self, schema: Schema, path: str) -> str:
        """Return the strings of a pattern or format, or of so many characters."""
        expression, form = schema.get("pattern"), schema.get("format")
        least, most = self.bounds(schema, "Length", path)
        if form is not None and not (isinstance(form, str) and form in pattern.FORMATS):
            self._cannot(at(path, "format"), f"is {str(form)[:40]!r}; {', '.join(pattern.FORMATS)} can be enforced")
            form = None
        if expression is not None and form is not None:
            self._cannot(at(path, "format"), "cannot be combined with 'pattern'")
        keyword = "pattern" if expression is not None else "format"
        wanted = expression if expression is not None else pattern.FORMATS.get(form) if form is not None else None
        if wanted is not None:
            if least > 0 or most is not None:
                self._cannot(at(path, keyword), "cannot be combined with 'minLength' or 'maxLength'")
            if not isinstance(wanted, str):
                raise SchemaError(at(path, keyword), "must be a string")
            try:
                return f'"\\"" {pattern.inside_quotes(self._rules, wanted)} "\\""'
            except pattern.PatternError as error:
                self._cannot(at(path, keyword), str(error))
        return f'"\\"" {repeated(pattern.any_character(self._rules), least, most)} "\\""'

    def integer(self, schema: Schema, path: str) -> str:
        """Return the whole numbers between bounds."""
        if schema.get("multipleOf", 1) not in (1, 1.0):
            self._cannot(at(path, "multipleOf"), "cannot be expressed by a grammar")
        low, high = self._limits(schema, path)
        if low is None and high is None:
            return ANY_INTEGER
        if low is not None and high is not None and low > high:
            raise SchemaError(path, f"allows no whole number: none lies between {low} and {high}")
        found = []
        if high is None or high >= 0:
            found += digits_between(max(low or 0, 0), high, _MOST_DIGITS)
        if low is None or low < 0:
            least = 1 if high is None or high >= -1 else -high
            most = None if low is None else -low
            found += [f'"-" {digits}' for digits in digits_between(least, most, _MOST_DIGITS)]
        return either(found)

    def _limits(self, schema: Schema, path: str) -> tuple[int | None, int | None]:
        """Return the smallest and the largest whole number that is allowed."""
        lows, highs = [], []
        for keyword, value in schema.items():
            if keyword not in {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 10**_MOST_DIGITS:
                raise SchemaError(at(path, keyword), f"must be a number of less than {_MOST_DIGITS + 1} digits")
            whole = int(value // 1)
            if keyword == "minimum":
                lows.append(whole if whole == value else whole + 1)
            elif keyword == "exclusiveMinimum":
                lows.append(whole + 1)
            elif keyword == "maximum":
                highs.append(whole)
            else:
                highs.append(whole - 1 if whole == value else whole)
        return max(lows, default=None), min(highs, default=None)

    def number(self, schema: Schema, path: str) -> str:
        """Return the numbers with fractions; of bounds only 0 at least can be expressed."""
        bounds = {name: schema[name] for name in OF_NUMBERS if name in schema}
        if bounds == {"minimum": 0}:
            return f"{_INTEGRAL} {_FRACTION}"
        for keyword in bounds:
            self._cannot(
                at(path, keyword), "cannot be expressed for numbers with fractions, but 'minimum': 0; use integers"
            )
        return ANY_NUMBER
