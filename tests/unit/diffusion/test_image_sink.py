"""What of the engine's steps is told."""

from types import SimpleNamespace

from services.diffusion.core.options import Encoding, Format
from services.diffusion.core.wire import Progress
from services.diffusion.outbox import Outbox
from services.diffusion.sink import Sink
from services.kit.clock import ManualClock


def told(steps: list[tuple[str, int, int]], *, every_s: float) -> list[tuple[int, int]]:
    said, clock = [], ManualClock()
    outbox = SimpleNamespace(put=lambda _, message, part: said.append((message.phase, message.step)))
    sink = Sink(outbox, None, Encoding(Format.PNG, 90, 4, embeds=False), clock)
    for phase, step, of in steps:
        sink.progress(Progress(1, phase, 0, step, of))
        clock.advance(every_s)
    return said


DENOISING = [("conditioning", 0, 1), *(("denoising", step, 20) for step in range(1, 21)), ("decoding", 0, 1)]


def test_slow_steps_are_all_told():
    assert len(told(DENOISING, every_s=0.2)) == len(DENOISING)


def test_of_quick_steps_the_first_and_the_last_of_each_phase_are_told_and_few_between():
    said = told(DENOISING, every_s=0.01)
    steps = [step for phase, step in said if phase == said[1][0]]
    assert (steps[0], steps[-1], len(said)) == (1, 20, 1 + len(steps) + 1)
    assert 4 <= len(steps) <= 6


async def test_a_slow_reader_hears_the_end_of_each_phase():
    outbox, clock = Outbox(), ManualClock()
    sink = Sink(outbox, None, Encoding(Format.PNG, 90, 4, embeds=False), clock)
    for phase, step, of in DENOISING:
        sink.progress(Progress(1, phase, 0, step, of))
        clock.advance(0.2)
    assert [said.message.step for said in await outbox.take()] == [0, 20, 0]
