import pytest

from services.admission.core.model import Modality, PoolSpec
from services.admission.settings import AdmissionSettings
from services.kit.settings import SettingsError, load


def settings(**environ: str) -> AdmissionSettings:
    return load(AdmissionSettings, {f"OMNISERVE_{name}": value for name, value in environ.items()})


def test_the_house_as_it_comes():
    default = settings()
    assert default.pools() == (PoolSpec("gpu0", 16), PoolSpec("cpu", 2))
    intake = default.intake()
    units = {one.name.lower(): intake.default_units(one, intake.pool_of[one]) for one in Modality}
    assert units == {
        "llm": 1,
        "embedding": 1,
        "image": 16,
        "tts": 1,
        "stt": 1,
        "multimodal": 1,
        "animation": 16,
        "three_d": 16,
        "video": 16,
        "forecast": 1,
        "cutout": 2,
        "training": 16,
        "aux": 1,
    }
    assert {one for one, pool in intake.pool_of.items() if pool == "cpu"} == {Modality.EMBEDDING}
    assert intake.wait_s == 120.0
    assert default.rules().max_queue == 10_000
    assert default.rules().ageing_s is None
    assert not default.rules().fair_share


def test_the_names_of_the_seeds_are_accepted():
    known = settings(SLOTS="4", IMAGE_PERMITS="2", BIREFNET_PERMITS="3", MAX_QUEUE="7", **{"3D_PERMITS": "1"})
    assert known.pools()[0].slots == 4
    units = known.intake().units_of
    assert (units[Modality.IMAGE], units[Modality.CUTOUT], units[Modality.THREE_D]) == (2, 3, 1)
    assert known.rules().max_queue == 7


def test_the_full_name_wins_over_the_short_one():
    assert settings(SLOTS="4", ADMISSION_SLOTS="8").pools()[0].slots == 8


def test_modalities_can_be_given_other_pools():
    intake = settings(ADMISSION_GPUS="2", ADMISSION_MODALITY_POOLS="image=gpu1,embedding=gpu0").intake()
    assert (intake.pool_of[Modality.IMAGE], intake.pool_of[Modality.EMBEDDING]) == ("gpu1", "gpu0")
    assert intake.slots == {"gpu0": 16, "gpu1": 16, "cpu": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ADMISSION_SLOTS", "0"),
        ("ADMISSION_IMAGE_PERMITS", "-1"),
        ("ADMISSION_IMAGE_PERMITS", "some"),
        ("ADMISSION_CPU_MODALITIES", "music"),
        ("ADMISSION_MODALITY_POOLS", "image=gpu7"),
        ("ADMISSION_MODALITY_POOLS", "image"),
        ("ADMISSION_TIMEOUT_S", "0"),
        ("ADMISSION_AGEING_S", "-3"),
        ("ADMISSION_SLOT", "4"),
    ],
)
def test_a_bad_value_stops_the_start_and_names_its_variable(name, value):
    with pytest.raises(SettingsError, match=f"OMNISERVE_{name}"):
        settings(**{name: value})
