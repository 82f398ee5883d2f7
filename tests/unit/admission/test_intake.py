import pytest

from services.admission.core.intake import FORCED_BACKGROUND, Intake, InvalidAskError, Wish
from services.admission.core.model import Modality, Tier

INTAKE = Intake(
    slots={"gpu0": 4, "cpu": 2},
    pool_of={one: "cpu" if one is Modality.EMBEDDING else "gpu0" for one in Modality},
    units_of={one: None if one is Modality.IMAGE else 3 if one is Modality.CUTOUT else 1 for one in Modality},
    wait_s=120.0,
)


def test_what_is_not_said_takes_the_defaults_of_the_house():
    ask = INTAKE.resolve(Wish(Modality.LLM))
    assert (ask.pool, ask.tier, ask.units, ask.wait_s, ask.principal, ask.may_wait) == (
        "gpu0",
        Tier.FREE,
        1,
        120.0,
        "anonymous",
        True,
    )


def test_an_exclusive_modality_takes_all_of_its_pool():
    assert INTAKE.resolve(Wish(Modality.IMAGE)).units == 4
    assert INTAKE.resolve(Wish(Modality.IMAGE, pool="cpu")).units == 2


def test_a_default_never_exceeds_the_pool():
    assert INTAKE.resolve(Wish(Modality.CUTOUT, pool="cpu")).units == 2


def test_embeddings_go_to_their_own_pool():
    assert INTAKE.resolve(Wish(Modality.EMBEDDING)).pool == "cpu"


@pytest.mark.parametrize("modality", sorted(FORCED_BACKGROUND))
def test_some_modalities_are_background_whoever_asks(modality):
    assert INTAKE.resolve(Wish(modality, tier=Tier.PAID)).tier is Tier.BACKGROUND


@pytest.mark.parametrize(
    ("wish", "field", "shown"),
    [
        (Wish(None), "modality", "not stated"),
        (Wish(Modality.LLM, units=5), "units", "5 slots asked, gpu0 has 4"),
        (Wish(Modality.LLM, pool="gpu9"), "pool", "'gpu9'"),
    ],
)
def test_an_ask_that_can_never_be_served_names_field_and_numbers(wish, field, shown):
    with pytest.raises(InvalidAskError) as error:
        INTAKE.resolve(wish)
    assert error.value.field == field
    assert shown in str(error.value)
