"""The spans that tell a trace about a request: the whole, and inside it the waits and the engine's work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace

from services.diffusion.core.options import Options
from services.diffusion.timeline import Timeline
from services.kit import telemetry

_NS: Final = 1_000_000_000


@contextmanager
def picture_span(model: str, options: Options, timeline: Timeline) -> Iterator[None]:
    """Record a span for a request with one inside for each stage that it has been through; free while tracing is off."""
    if not telemetry.tracing():
        yield
        return
    tracer = telemetry.tracer(__name__)
    sampling = options.sampling
    with tracer.start_as_current_span(
        f"image {model}",
        attributes={
            "gen_ai.operation.name": "image_generation",
            "gen_ai.provider.name": "stable-diffusion.cpp",
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": options.n,
            "gen_ai.output.type": "image",
            "omniserve.image.width": options.width,
            "omniserve.image.height": options.height,
            "omniserve.image.steps": sampling.steps,
        },
        record_exception=False,
    ):
        try:
            yield
        finally:
            _stages(tracer, timeline)


def _stages(tracer: trace.Tracer, timeline: Timeline) -> None:
    for name, begin_s, end_s in timeline.stages():
        tracer.start_span(name, start_time=int(begin_s * _NS)).end(int(end_s * _NS))
