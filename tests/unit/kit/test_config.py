"""omniserve.yaml: every fault has its line, and unknown names the nearest known one."""

import pytest
from pydantic import BaseModel, ConfigDict, Field

from services.kit.config import ConfigError, Document, parse, read


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Leaf(Strict):
    address: str
    weight: int = Field(default=1, ge=1)


class Worker(Strict):
    endpoints: tuple[str | Leaf, ...] = ()
    health_path: str | None = None
    spare: Leaf | None = None


class Workers(Strict):
    image: Worker | None = None
    image_worker: Worker | None = None


def section(text, kind, name):
    return parse(text, "omniserve.yaml").section(name, kind)


def faults(text, kind=None, name="upstreams"):
    with pytest.raises(ConfigError) as caught:
        section(text, kind, name)
    return [str(fault) for fault in caught.value.faults]


def test_a_section_comes_back_as_the_rooms_own_values():
    text = "upstreams:\n  image:\n    endpoints: [http://a:1, {address: http://b:2, weight: 3}]\n"
    workers = parse(text, "omniserve.yaml").section("upstreams", Workers)
    assert workers.image.endpoints == ("http://a:1", Leaf(address="http://b:2", weight=3))
    assert workers.image_worker is None


def test_a_section_may_be_a_list_or_a_mapping_of_values():
    document = parse("keys:\n- address: one\nlanes:\n  fast: {address: two}\n", "f")
    assert document.section("keys", list[Leaf]) == [Leaf(address="one")]
    assert document.section("lanes", dict[str, Leaf]) == {"fast": Leaf(address="two")}


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "upstreams:\n", "keys: []\n"])
def test_an_absent_or_empty_section_is_none(text):
    assert parse(text, "f").section("upstreams", Workers) is None


def test_no_file_is_an_empty_document():
    assert read(None) == Document()
    assert read(None).section("keys", list[Leaf]) is None


def test_an_unknown_section_is_refused_with_its_line_and_the_nearest_name():
    assert faults("keys: []\n\nupstream:\n  image: {}\n") == [
        "omniserve.yaml:3: upstream: no such section; did you mean `upstreams`?"
    ]


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name():
    text = "upstreams:\n  image:\n    endpoints: []\n    helth_path: /up\n"
    assert faults(text, Workers) == [
        "omniserve.yaml:4: upstreams.image.helth_path: no such setting; did you mean `health_path`?"
    ]


def test_an_unknown_key_that_is_like_nothing_is_refused_with_all_names():
    (fault,) = faults("upstreams:\n  zzz: {}\n", Workers)
    assert fault == "omniserve.yaml:2: upstreams.zzz: no such setting; there are `image`, `image_worker`"


def test_every_fault_is_told_at_once():
    text = (
        "upstreams:\n  image:\n    helth_path: /up\n  image_worke:\n    endpoints: []\n  image_worker:\n    spare: {}\n"
    )
    assert faults(text, Workers) == [
        "omniserve.yaml:3: upstreams.image.helth_path: no such setting; did you mean `health_path`?",
        "omniserve.yaml:7: upstreams.image_worker.spare: needs `address`",
        "omniserve.yaml:4: upstreams.image_worke: no such setting; did you mean `image_worker`?",
    ]


def test_a_fault_within_a_list_or_a_union_has_the_items_line():
    text = "upstreams:\n  image:\n    endpoints:\n    - http://a:1\n    - address: http://b:2\n      wieght: 3\n"
    assert "omniserve.yaml:6: upstreams.image.endpoints[1].wieght: no such setting; did you mean `weight`?" in faults(
        text, Workers
    )


def test_a_wrong_value_is_told_with_its_bound_and_without_the_value():
    text = "upstreams:\n  image:\n    spare: {address: SECRET-1, weight: 0}\n"
    (fault,) = faults(text, Workers)
    assert fault == "omniserve.yaml:3: upstreams.image.spare.weight: input should be greater than or equal to 1"


def test_a_key_that_is_set_twice_is_refused():
    assert faults("upstreams:\n  image: {}\n  image: {}\n") == [
        "omniserve.yaml:3: upstreams.image: is set twice, first in line 2"
    ]


def test_keys_are_what_is_written():
    assert parse("models:\n  3d: on\n  on: 1\n  2026-01-01: x\n", "f").data["models"] == {
        "3d": True,
        "on": 1,
        "2026-01-01": "x",
    }


def test_anchors_and_merges_work_and_own_keys_win():
    text = "x-base: &base {health_path: /up, endpoints: [http://a:1]}\nupstreams:\n  image: {<<: *base, health_path: /own}\n"
    image = parse(text, "f").section("upstreams", Workers).image
    assert (image.health_path, image.endpoints) == ("/own", ("http://a:1",))


@pytest.mark.parametrize(
    ("text", "line"), [("upstreams:\n  image: [\n", 3), ("a: b: c\n", 1), ("keys:\n\t- x\n", 2), ("? [a]\n: 1\n", 1)]
)
def test_what_is_no_yaml_is_refused_with_a_line(text, line):
    (fault,) = faults(text)
    assert fault.startswith(f"omniserve.yaml:{line}: is no YAML: ")


@pytest.mark.parametrize("text", ["- a\n", "just words\n", "12\n"])
def test_a_file_without_sections_is_refused(text):
    assert faults(text) == ["omniserve.yaml:1: must be sections, such as `upstreams:`"]


def test_objects_of_python_are_never_made():
    for value in ("!!python/object/apply:os.getcwd []", "!!python/name:os.getcwd x", "!stranger {a: 1}"):
        (fault,) = faults(f"keys: {value}\n")
        assert fault.startswith("omniserve.yaml:1: is no YAML: ")


def test_aliases_that_multiply_are_refused():
    lines = ["x-0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (fault,) = faults("\n".join(lines))
    assert "more than 100000 values" in fault


def test_a_value_within_itself_is_refused():
    (fault,) = faults("x-a: &a\n  b: *a\n")
    assert "is no YAML" in fault


def test_a_file_that_is_missing_or_no_text_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        read(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml: is no UTF-8 text"):
        read(tmp_path / "binary.yaml")


def test_a_room_can_tell_its_own_faults_by_line():
    document = parse("upstreams:\n  image:\n    endpoints:\n    - http://a:1\n    - ftp://b\n", "f.yaml")
    fault = document.fault(("upstreams", "image", "endpoints", 1), "is no address")
    assert str(fault) == "f.yaml:5: upstreams.image.endpoints[1]: is no address"
    nearest = document.fault(("upstreams", "image", "overflow", "ca"), "is no file")
    assert (nearest.line, nearest.setting) == (2, "upstreams.image")
