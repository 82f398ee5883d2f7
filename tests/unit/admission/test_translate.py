import pytest

from omniserve.admission.v1 import admission_pb2 as pb
from services.admission import translate
from services.admission.core.desk import SETTLING
from services.admission.core.intake import Wish
from services.admission.core.model import (
    ALL_MODALITIES,
    Ask,
    Granted,
    Modality,
    Queued,
    Refusal,
    Rejected,
    Tier,
    YieldRequested,
)
from services.kit.errors import DomainError, Reason

ASK = Ask("gpu0", Modality.IMAGE, Tier.SUB, 4, 10.0)


def test_our_numbers_are_those_of_the_contract():
    assert {f"MODALITY_{one.name}": int(one) for one in Modality} | {"MODALITY_UNSPECIFIED": 0} == dict(
        pb.Modality.items()
    )
    assert {f"TIER_{one.name}": int(one) for one in Tier} | {"TIER_UNSPECIFIED": 0} == dict(pb.Tier.items())


def test_every_refusal_is_a_reason_of_the_mesh():
    assert set(translate.REASONS) == set(Refusal)


def test_what_is_not_said_stays_unsaid():
    assert translate.wish(pb.Ask()) == Wish(None)
    assert translate.wish(pb.Ask(modality=99, tier=99)) == Wish(None)


def test_everything_that_is_said_arrives():
    said = pb.Ask(
        modality=pb.MODALITY_STT,
        tier=pb.TIER_PAID,
        units=0,
        mode=pb.MODE_TRY,
        wait_ms=1500,
        principal="alice",
        pool="cpu",
    )
    assert translate.wish(said) == Wish(Modality.STT, Tier.PAID, 0, False, 1.5, "alice", "cpu")


@pytest.mark.parametrize(
    ("event", "kind", "message"),
    [
        (Queued(1, 3, 0.2501), "queued", pb.Queued(position=3, eta_ms=251)),
        (Queued(1, 3, None), "queued", pb.Queued(position=3)),
        (
            Granted(1, 0.5),
            "granted",
            pb.Granted(permit_id="2-1", waited_ms=500, units=4, pool="gpu0", tier=pb.TIER_SUB),
        ),
        (YieldRequested(1, Tier.PAID), "yield_requested", pb.YieldRequested(waiting_tier=pb.TIER_PAID)),
        (
            Rejected(1, Refusal.QUEUE_FULL, "full", 2.0),
            "rejected",
            pb.Rejected(reason="queue_full", message="full", retry_after_ms=2000),
        ),
        (
            Rejected(1, Refusal.NO_CAPACITY, "none", None),
            "rejected",
            pb.Rejected(reason="no_capacity", message="none"),
        ),
    ],
)
def test_events_say_the_same_in_the_contract(event, kind, message):
    assert translate.told(event, ASK, "2-1") == (kind, message)


def make_hold(hold_id: str = "h", **fields: object):
    pools = frozenset({"gpu0", "cpu"})
    return translate.hold(pb.HoldRequest(**fields), hold_id=hold_id, pools=pools, excluded=frozenset(), now=100.0)


def test_a_hold_that_names_nothing_holds_everything():
    hold = make_hold(seconds=60, reason="r")
    assert (hold.pools, hold.modalities, hold.until, hold.reason) == ({"gpu0", "cpu"}, ALL_MODALITIES, 160.0, "r")


def test_a_hold_may_name_its_pool_and_modalities():
    hold = make_hold(seconds=1, pool="cpu", modalities=[pb.MODALITY_LLM])
    assert (hold.pools, hold.modalities) == ({"cpu"}, {Modality.LLM})


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"seconds": 0}, Reason.INVALID_REQUEST, "seconds"),
        ({"seconds": 3601}, Reason.INVALID_REQUEST, "seconds"),
        ({"seconds": 1, "pool": "gpu5"}, Reason.NOT_FOUND, "pool"),
        ({"seconds": 1, "modalities": [pb.MODALITY_UNSPECIFIED]}, Reason.INVALID_REQUEST, "modalities"),
        ({"seconds": 1, "hold_id": SETTLING}, Reason.INVALID_REQUEST, "hold_id"),
    ],
)
def test_a_hold_that_cannot_be_names_its_field(fields, reason, field):
    with pytest.raises(DomainError) as error:
        make_hold(**fields)
    assert (error.value.reason, error.value.field) == (reason, field)
