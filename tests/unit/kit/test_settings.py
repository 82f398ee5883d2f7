from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import SecretStr

from services.kit.settings import (
    Address,
    MeshSettings,
    ServiceSettings,
    SettingsError,
    check_environment,
    knob,
    known_variables,
    load,
    settings_table,
)


class Oven(ServiceSettings):
    service: ClassVar[str] = "oven"

    slots: int = knob(16, "Trays at once.", aliases=("OMNISERVE_SLOTS",), ge=1, le=64)
    heat_c: float = knob(180.0, "Heat.", unit="°C", gt=0, lt=400)
    mode: Literal["top", "bottom"] = knob("top", "Where the heat comes from.")
    racks: tuple[str, ...] = knob(("low", "high"), "Racks in use.")
    limit: int | None = knob(None, "Most cakes a day.")
    listen: Address = knob("127.0.0.1:9999", "Where it listens.")
    light: bool = knob(False, "Whether the light is on.")
    key: SecretStr = knob(SecretStr(""), "Opens the door.", secret=True)


class Fridge(MeshSettings):
    service: ClassVar[str] = "fridge"

    cold_c: float = knob(4.0, "Cold.", unit="°C")


def problems_of(environ: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(Oven, environ)
    return caught.value.problems


def test_without_variables_every_knob_has_its_default():
    oven = load(Oven, {})
    assert (oven.slots, oven.heat_c, oven.racks, oven.limit) == (16, 180.0, ("low", "high"), None)


def test_each_kind_of_value_is_read_from_its_prefixed_variable():
    oven = load(
        Oven,
        {
            "OMNISERVE_OVEN_SLOTS": "3",
            "OMNISERVE_OVEN_HEAT_C": "99.5",
            "OMNISERVE_OVEN_MODE": "bottom",
            "OMNISERVE_OVEN_RACKS": "a, b,c",
            "OMNISERVE_OVEN_LIMIT": "7",
            "OMNISERVE_OVEN_LIGHT": "1",
            "OMNISERVE_OVEN_KEY": "sesame",
        },
    )
    assert (oven.slots, oven.heat_c, oven.mode, oven.racks) == (3, 99.5, "bottom", ("a", "b", "c"))
    assert (oven.limit, oven.light, oven.key.get_secret_value()) == (7, True, "sesame")


def test_a_list_may_also_be_written_as_json():
    assert load(Oven, {"OMNISERVE_OVEN_RACKS": '["a,b", "c"]'}).racks == ("a,b", "c")


def test_an_alias_is_accepted_and_the_prefixed_name_wins_over_it():
    assert load(Oven, {"OMNISERVE_SLOTS": "2"}).slots == 2
    assert load(Oven, {"OMNISERVE_SLOTS": "2", "OMNISERVE_OVEN_SLOTS": "5"}).slots == 5


def test_a_variable_that_is_set_but_empty_counts_as_not_set():
    assert load(Oven, {"OMNISERVE_OVEN_SLOTS": "", "OMNISERVE_SLOTS": "4"}).slots == 4


def test_building_the_class_directly_reads_no_environment(monkeypatch):
    monkeypatch.setenv("OMNISERVE_OVEN_SLOTS", "3")
    assert Oven().slots == 16
    assert Oven(slots=9).slots == 9
    assert load(Oven).slots == 3


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Oven().slots = 3  # type: ignore[misc]


def test_every_bad_value_is_named_with_the_variable_that_carries_it():
    problems = problems_of({"OMNISERVE_SLOTS": "lots", "OMNISERVE_OVEN_HEAT_C": "-1", "OMNISERVE_OVEN_LISTEN": "here"})
    assert [problem.split(":")[0] for problem in problems] == [
        "OMNISERVE_SLOTS",
        "OMNISERVE_OVEN_HEAT_C",
        "OMNISERVE_OVEN_LISTEN",
    ]
    assert "'lots'" in problems[0]
    assert "greater than 0" in problems[1]
    assert "host:port" in problems[2]


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:port", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused(address):
    assert problems_of({"OMNISERVE_OVEN_LISTEN": address})


def test_an_unknown_variable_with_the_own_prefix_is_refused_with_the_nearest_known_name():
    assert problems_of({"OMNISERVE_OVEN_SLOT": "3"}) == (
        "OMNISERVE_OVEN_SLOT: no such setting; did you mean OMNISERVE_OVEN_SLOTS?",
    )


def test_variables_of_others_are_not_this_services_business():
    assert load(Oven, {"OMNISERVE_FRIDGE_WHATEVER": "1", "PATH": "/bin"}).slots == 16


def test_unknown_and_bad_are_reported_together():
    assert len(problems_of({"OMNISERVE_OVEN_NOPE": "1", "OMNISERVE_OVEN_SLOTS": "0"})) == 2


class Safe(ServiceSettings):
    service: ClassVar[str] = "safe"

    code: SecretStr = knob(SecretStr(""), "Opens it.", secret=True, aliases=())
    pin: SecretStr | None = knob(None, "Opens it too.", secret=True)


def test_a_secret_is_never_shown_in_repr_error_or_table():
    safe = load(Safe, {"OMNISERVE_SAFE_CODE": "hunter2"})
    assert "hunter2" not in repr(safe) + str(safe)
    assert "hunter2" not in settings_table(Safe)
    with pytest.raises(SettingsError) as caught:
        load(Safe, {"OMNISERVE_SAFE_CODE": "hunter2", "OMNISERVE_SAFE_COD": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_secret_knob_of_another_type_is_refused():
    class Leaky(ServiceSettings):
        service: ClassVar[str] = "leaky"
        code: str = knob("", "Opens it.", secret=True)

    with pytest.raises(TypeError, match=r"Leaky\.code"):
        known_variables(Leaky)


def test_a_field_without_a_knob_is_refused():
    class Bare(ServiceSettings):
        service: ClassVar[str] = "bare"
        size: int = 3

    with pytest.raises(TypeError, match=r"Bare\.size"):
        load(Bare, {})


def test_shared_settings_go_by_their_short_name_and_one_service_may_differ():
    assert load(Fridge, {"OMNISERVE_STATE_DIR": "/x"}).state_dir == Path("/x")
    both = {"OMNISERVE_LOG_LEVEL": "error", "OMNISERVE_FRIDGE_LOG_LEVEL": "debug"}
    assert load(Fridge, both).log_level == "debug"
    assert load(Fridge, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317"}).otlp_endpoint == "http://h:4317"


def test_the_whole_namespace_is_checked_against_all_rooms():
    check_environment([Oven, Fridge], {"OMNISERVE_SLOTS": "2", "OMNISERVE_FRIDGE_COLD_C": "1", "HOME": "/"})
    with pytest.raises(SettingsError) as caught:
        check_environment(
            [Oven, Fridge],
            {"OMNISERVE_FRIGDE_COLD_C": "1", "OMNISERVE_OVEN_SLOTS": "0", "OMNISERVE_LOG_LEVEL": "loud"},
        )
    text = str(caught.value)
    assert "OMNISERVE_FRIGDE_COLD_C: no such setting; did you mean OMNISERVE_FRIDGE_COLD_C?" in text
    assert "OMNISERVE_OVEN_SLOTS" in text
    assert "OMNISERVE_LOG_LEVEL: 'loud'" in text


def test_the_table_names_variable_default_unit_sentence_and_aliases():
    rows = settings_table(Oven).splitlines()
    assert "| `OMNISERVE_OVEN_SLOTS` | `16` |  | Trays at once. Also accepted: `OMNISERVE_SLOTS`. |" in rows
    assert "| `OMNISERVE_OVEN_HEAT_C` | `180.0` | °C | Heat. |" in rows
    assert "| `OMNISERVE_OVEN_KEY` | (secret) |  | Opens the door. |" in rows
    assert "| `OMNISERVE_OVEN_LIMIT` | (none) |  | Most cakes a day. |" in rows


def test_the_rooms_own_table_leaves_out_what_every_service_knows():
    assert "OMNISERVE_STATE_DIR" not in settings_table(Fridge)
    assert "OMNISERVE_STATE_DIR" in settings_table(Fridge, shared=True)
