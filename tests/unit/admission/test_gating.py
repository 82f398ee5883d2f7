"""What routes ask for at the gate, and what callers hear who are not let in."""

import json

import pytest

from services.admission.core.gating import (
    Admissible,
    Answer,
    BadRouteError,
    Requirement,
    body,
    parse,
    receive,
    refused,
)
from services.admission.core.intake import Intake
from services.admission.core.model import Ask, Modality, Refusal, Rejected, Tier

UNITS = dict.fromkeys(Modality, 1) | {Modality.IMAGE: None, Modality.CUTOUT: 2}
INTAKE = Intake(
    slots={"gpu0": 4, "cpu": 2},
    pool_of=dict.fromkeys(Modality, "gpu0") | {Modality.EMBEDDING: "cpu"},
    units_of=UNITS,
    wait_s=120.0,
)


def admitted(ask: str, tier: str = "", client: str = "") -> Admissible:
    decided = receive(ask, tier, client, INTAKE)
    assert isinstance(decided, Admissible)
    return decided


def turned_away(ask: str, tier: str = "", client: str = "") -> Answer:
    decided = receive(ask, tier, client, INTAKE)
    assert isinstance(decided, Answer)
    return decided


def rejected(refusal: Refusal, retry_after_s: float | None = None) -> Answer:
    return refused(Rejected(1, refusal, "4 of 4 slots are in use", retry_after_s))


def test_everything_that_a_route_can_say_is_understood():
    text = "route=images.worker;upstream=image;modality=image;units=3;tier=background;try;paying=paid+sub"
    assert parse(text) == Requirement(
        "images.worker", "image", Modality.IMAGE, 3, Tier.BACKGROUND, False, frozenset({Tier.PAID, Tier.SUB})
    )


def test_a_route_that_says_no_more_than_its_modality_waits_for_its_default():
    assert parse("modality=three_d") == Requirement("", "", Modality.THREE_D)


def test_words_of_newer_versions_are_passed_over():
    assert parse("modality=llm;colour=blue;loud") == Requirement("", "", Modality.LLM)


@pytest.mark.parametrize("text", ["", "route=x", "modality=3d", "modality=llm;units=-1", "modality=llm;tier=best"])
def test_a_route_that_cannot_be_understood_is_the_edges_fault(text: str):
    with pytest.raises(BadRouteError):
        parse(text)
    assert turned_away(text).status == 500


def test_a_request_asks_with_the_callers_tier_and_name():
    assert admitted("modality=llm", "paid", "alice").ask == Ask("gpu0", Modality.LLM, Tier.PAID, 1, 120.0, "alice")


def test_a_caller_without_a_tier_is_free_and_anonymous():
    assert admitted("modality=llm").ask == Ask("gpu0", Modality.LLM, Tier.FREE, 1, 120.0, "anonymous")


def test_a_tier_that_does_not_exist_is_the_callers_fault():
    answer = turned_away("modality=llm", "gold")
    assert (answer.status, answer.reason) == (400, "invalid_request")
    assert "paid, sub, free, background" in answer.message


def test_a_forced_tier_wins_over_the_callers():
    assert admitted("modality=llm;tier=background", "paid").ask.tier is Tier.BACKGROUND


def test_training_is_background_whatever_route_and_caller_say():
    assert admitted("modality=training;tier=paid", "paid").ask.tier is Tier.BACKGROUND


def test_a_modality_that_takes_the_whole_device_asks_for_all_slots():
    assert admitted("modality=image").ask.units == 4


def test_units_of_a_route_are_at_most_the_pool():
    assert admitted("modality=llm;units=16").ask.units == 4
    assert admitted("modality=embedding;units=16").ask.units == 2
    assert admitted("modality=llm;units=0").ask.units == 0


def test_a_route_with_somewhere_else_to_go_does_not_wait():
    assert not admitted("modality=llm;try").ask.may_wait


def test_the_upstream_is_the_modalitys_when_the_route_does_not_name_it():
    assert admitted("modality=image;upstream=image_worker").upstream == "image_worker"
    assert admitted("modality=image").upstream == "image"


@pytest.mark.parametrize("tier", ["", "free", "background"])
def test_a_paying_route_is_closed_to_other_tiers(tier: str):
    answer = turned_away("modality=llm;paying=paid+sub", tier)
    assert (answer.status, answer.reason, answer.retry_after_s) == (402, "payment_required", None)
    assert "paid or sub" in answer.message


@pytest.mark.parametrize("tier", ["paid", "sub"])
def test_a_paying_route_is_open_to_its_tiers_even_when_it_forces_another(tier: str):
    assert admitted("modality=llm;paying=paid+sub;tier=background", tier).ask.tier is Tier.BACKGROUND


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Refusal.QUEUE_FULL, 429),
        (Refusal.ADMISSION_TIMEOUT, 429),
        (Refusal.SATURATED, 503),
        (Refusal.DRAINING, 503),
        (Refusal.NO_CAPACITY, 503),
    ],
)
def test_every_refusal_has_its_status_and_says_when_to_come_back(refusal: Refusal, status: int):
    answer = rejected(refusal)
    assert (answer.status, answer.reason, answer.retry_after_s) == (status, refusal.value, 1)
    assert rejected(refusal, 2.1).retry_after_s == 3


def test_only_a_device_that_is_taken_or_missing_sends_a_request_elsewhere():
    marked = {refusal for refusal in Refusal if rejected(refusal).is_saturated}
    assert marked == {Refusal.SATURATED, Refusal.NO_CAPACITY}


def test_a_refusal_has_the_shape_of_openais_errors():
    error = json.loads(body(rejected(Refusal.QUEUE_FULL, 7.0), "r-1"))["error"]
    assert error == {
        "message": "4 of 4 slots are in use.",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
        "reason": "queue_full",
        "request_id": "r-1",
        "retry_after_ms": 7000,
    }
