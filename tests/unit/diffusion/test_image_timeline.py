"""When things happened to a request, as callers and traces are told."""

from services.diffusion.timeline import Timeline
from services.kit.clock import ManualClock


def test_a_request_that_waited_for_its_model_has_three_stages():
    clock = ManualClock(wall=100.0)
    timeline = Timeline(clock)
    clock.advance(1)
    timeline.loading()
    clock.advance(2)
    timeline.loading()
    timeline.granted()
    clock.advance(4)
    timeline.computed()
    assert (timeline.queue_ms, timeline.load_ms) == (1000, 2000)
    assert timeline.stages() == [("queue", 100.0, 101.0), ("load", 101.0, 103.0), ("compute", 103.0, 107.0)]


def test_a_request_that_was_refused_has_no_stage():
    assert Timeline(ManualClock()).stages() == []


def test_a_loaded_model_leaves_only_the_wait_for_the_permit():
    clock = ManualClock(wall=100.0)
    timeline = Timeline(clock)
    clock.advance(3)
    timeline.granted()
    assert (timeline.queue_ms, timeline.load_ms) == (3000, 0)
    assert timeline.stages() == [("queue", 100.0, 103.0)]
