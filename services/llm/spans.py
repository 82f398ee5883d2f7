"""When things happened to a generation, and the spans that tell a trace about it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace

from services.kit import telemetry
from services.kit.clock import Clock
from services.llm.core.options import Options
from services.llm.core.prompt import Chat
from services.llm.core.wire import Finish, Limits

_NS: Final = 1_000_000_000


class Timeline:
    """The moments of one generation. Begins when it asks for its permit."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked_s = clock.monotonic()
        self._asked_ns = int(clock.wall() * _NS)
        self._granted_s: float | None = None
        self._first_s: float | None = None
        self._last_s: float | None = None
        self.finishes: list[Finish] = []

    def granted(self) -> None:
        """Note that the permit is there."""
        self._granted_s = self._clock.monotonic()

    def gained(self) -> None:
        """Note that tokens arrived."""
        now_s = self._clock.monotonic()
        self._first_s = now_s if self._first_s is None else self._first_s
        self._last_s = now_s

    def ended(self, finishes: list[Finish]) -> None:
        """Note how it ended."""
        self.finishes = finishes

    @property
    def queue_ms(self) -> int:
        """Milliseconds from asking to the permit."""
        return _ms(self._asked_s, self._granted_s)

    @property
    def prefill_ms(self) -> int:
        """Milliseconds from the permit to the first token."""
        return _ms(self._granted_s, self._first_s)

    @property
    def decode_ms(self) -> int:
        """Milliseconds from the first token to the last."""
        return _ms(self._first_s, self._last_s)

    def stages(self) -> list[tuple[str, int, int]]:
        """Return name, beginning and end of each stage that was completed, nanoseconds since 1970."""
        moments = [self._asked_s, self._granted_s, self._first_s, self._last_s]
        names = ["queue", "prefill", "decode"]
        return [
            (name, self._wall_ns(begin), self._wall_ns(end))
            for name, begin, end in zip(names, moments, moments[1:], strict=False)
            if begin is not None and end is not None
        ]

    def _wall_ns(self, moment_s: float) -> int:
        return self._asked_ns + int((moment_s - self._asked_s) * _NS)


def _ms(begin_s: float | None, end_s: float | None) -> int:
    return 0 if begin_s is None or end_s is None else round((end_s - begin_s) * 1000)


@contextmanager
def generation_span(
    model: str, content: object, options: Options, limits: Limits, timeline: Timeline
) -> Iterator[None]:
    """Record a span for a generation with one inside for each stage; costs nothing while tracing is off."""
    if not telemetry.tracing():
        yield
        return
    operation = "chat" if isinstance(content, Chat) else "text_completion"
    tracer = telemetry.tracer(__name__)
    with tracer.start_as_current_span(
        f"{operation} {model}",
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "llama.cpp",
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": limits.max_tokens,
            "gen_ai.request.temperature": options.sampling.temperature,
            "gen_ai.request.top_p": options.sampling.top_p,
            "gen_ai.request.choice.count": options.choices,
        },
        record_exception=False,
    ) as span:
        try:
            yield
        finally:
            _finish(span, tracer, timeline)


def _finish(span: trace.Span, tracer: trace.Tracer, timeline: Timeline) -> None:
    for name, begin_ns, end_ns in timeline.stages():
        tracer.start_span(name, start_time=begin_ns).end(end_ns)
    if timeline.finishes:
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": timeline.finishes[0].prompt_tokens,
                "gen_ai.usage.output_tokens": sum(finish.completion_tokens for finish in timeline.finishes),
                "gen_ai.response.finish_reasons": [finish.reason for finish in timeline.finishes],
            }
        )
