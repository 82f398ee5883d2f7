"""Chat templates: a model's own Jinja, rendered in a sandbox with bounds on time and size.

A template comes out of a downloaded file, and its variables out of a request, so neither is trusted: nothing is reachable
but plain values, and a template that loops or explodes ends with TemplateError.
"""

import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Final, TypeVar

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHATML: Final = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""Stands in for a model without a template."""

_RANGE: Final = 10_000

_WIDE: Final = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")

T = TypeVar("T")


class TemplateError(Exception):
    """The template refused the conversation, is broken, or went beyond its bounds."""


class _OutOfTime(BaseException):
    """Raised inside a template by the timer; no `except Exception` on the way may swallow it."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote; for rendering it is what stands inside."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way to declare them

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with bounds where one operation could take all time or memory."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, most_bytes: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self._most_bytes = most_bytes

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - any values
        """Compute `left operator right` unless the result would be huge."""
        if operator == "**":
            raise TemplateError("powers are not available to templates")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateError("the template formats with a width that is not its own or very large")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, bytes, list, tuple)) and isinstance(times, int):
                    self._check(len(text) * times)
        return super().call_binop(context, operator, left, right)

    def _check(self, size: int) -> None:
        if size > self._most_bytes:
            raise TemplateError(f"the template builds a value of {size} characters; the most is {self._most_bytes}")


class ChatTemplate:
    """A compiled template. `render_s`: seconds a rendering may take; `most_bytes`: how long its text may be."""

    def __init__(self, source: str, *, bos: str, eos: str, render_s: float, most_bytes: int) -> None:
        self._render_s = render_s
        self._most_bytes = most_bytes
        environment = _Sandbox(most_bytes)
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise,
            range=_range,
            bos_token=bos,
            eos_token=eos,
            dict=dict,
            namespace=environment.globals["namespace"],
        )
        for name in ("lipsum", "cycler", "joiner"):
            environment.globals.pop(name, None)
        self._environment = environment
        self._compiled = self._bounded(lambda: environment.from_string(source))

    def render(self, *, now_unix_s: float, **variables: Any) -> str:  # noqa: ANN401 - the template's own
        """Return the prompt. Raises TemplateError. Main thread only: the bound on time is a signal."""
        now = datetime.fromtimestamp(now_unix_s, UTC)
        variables["strftime_now"] = lambda form: now.strftime(str(form)[:64])
        return self._bounded(lambda: self._joined(self._compiled.generate(**variables)))

    def _joined(self, pieces: Iterator[str]) -> str:
        text: list[str] = []
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > self._most_bytes:
                raise TemplateError(f"the prompt is longer than {self._most_bytes} characters")
            text.append(piece)
        return "".join(text)

    def _bounded(self, work: Callable[[], T]) -> T:
        try:
            with _timer(self._render_s):
                return work()
        except _OutOfTime:
            raise TemplateError(f"the model's chat template did not finish within {self._render_s:g} s") from None
        except (JinjaError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise TemplateError(f"the model's chat template does not accept this chat: {error}"[:500]) from None
        except (MemoryError, RecursionError) as error:
            raise TemplateError(f"the model's chat template went beyond its bounds: {type(error).__name__}") from None


@contextmanager
def _timer(seconds: float) -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    former = signal.signal(signal.SIGALRM, ring)
    # Again and again: an exception inside a destructor or a callback is lost, the next one is not.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _raise(message: object) -> None:
    raise JinjaError(str(message)[:400])


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > _RANGE:
        raise TemplateError(f"the template counts to {len(numbers)}; the most is {_RANGE}")
    return numbers


def _tojson(
    value: Any,  # noqa: ANN401 - any JSON value
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature that templates rely on
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - the signature that templates rely on
) -> str:
    """Return JSON as it is, without Jinja's HTML escapes: prompts are no web pages."""
    if indent is not None:
        indent = min(int(indent), 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def template_variables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return request variables without the names that belong to us."""
    ours = {"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception", "self"}
    return {name: value for name, value in values.items() if name not in ours}
