"""Who waits for room is served in order, and whoever comes later takes nothing away."""

from services.vram.core.line import Line
from services.vram.core.model import Ask, Tier, Wanted

DEVICES = ("gpu0", "gpu1")


def ask(tenant, tier, *devices):
    return Ask(tenant, tuple(Wanted(device, 1, 1) for device in devices), tier, 10)


def names(line):
    return [waiting.ask.tenant for waiting in line.ordered()]


def test_better_tiers_come_first_and_then_who_came_first():
    line = Line()
    for tenant, tier in (("a", Tier.FREE), ("b", Tier.PAID), ("c", Tier.FREE), ("d", Tier.PAID)):
        line.join(ask(tenant, tier, "gpu0"), 0)
    assert names(line) == ["b", "d", "a", "c"]


def test_who_does_not_fit_closes_its_device_to_those_behind_and_no_other():
    line = Line()
    for tenant, device in (("a", "gpu0"), ("b", "gpu0"), ("c", "gpu1")):
        line.join(ask(tenant, Tier.FREE, device), 0)

    line.serve(DEVICES, lambda waiting, closed: waiting.ask.tenant != "a" and waiting.ask.items[0].device not in closed)
    assert names(line) == ["a", "b"]


def test_who_wants_any_device_closes_all_of_them():
    line = Line()
    line.join(ask("a", Tier.SUB, ""), 0)
    assert set(line.closed_to(Tier.SUB, DEVICES)) == set(DEVICES)
    assert set(line.closed_to(Tier.BACKGROUND, DEVICES)) == set(DEVICES)
    assert line.closed_to(Tier.PAID, DEVICES) == {}


def test_who_leaves_is_waited_for_no_more():
    line = Line()
    ticket = line.join(ask("a", Tier.PAID, "gpu0"), 0).ticket
    assert "a (tier paid) came first" in line.closed_to(Tier.FREE, DEVICES)["gpu0"]
    line.leave(ticket)
    line.leave(ticket)
    assert line.closed_to(Tier.FREE, DEVICES) == {}
    assert len(line) == 0
