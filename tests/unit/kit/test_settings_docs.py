import pytest

from services.kit import settings_docs
from services.kit.settings import SettingsError, load
from services.kit.settings_docs import ROOT, Room, documents, rooms


def test_the_settings_tables_in_the_checkout_match_the_code():
    assert settings_docs.main(["--check"]) == 0, "run: python -m services.kit.settings_docs"


def test_every_room_of_the_checkout_is_found_and_no_base_class_is():
    found = {room.folder.relative_to(ROOT).as_posix() for room in rooms()}
    assert "services/kit" not in found
    expected = {p.parent.relative_to(ROOT).as_posix() for p in ROOT.glob("services/*/settings.py")} - {"services/kit"}
    assert expected <= found


def test_a_readme_that_drifted_is_noticed_and_only_its_marked_part_is_replaced(tmp_path):
    folder = tmp_path / "services" / "x"
    folder.mkdir(parents=True)
    room = Room(folder, rooms()[0].classes)
    readme = folder / "README.md"
    readme.write_text("# X\n\n<!-- settings:begin -->\nstale\n<!-- settings:end -->\n\nThe end.\n")
    wanted = documents([room], tmp_path).texts[readme]
    assert wanted.startswith("# X\n\n<!-- settings:begin -->\n| variable |")
    assert wanted.endswith("<!-- settings:end -->\n\nThe end.\n")
    assert "stale" not in wanted


def test_a_readme_without_markers_is_refused_by_name(tmp_path):
    folder = tmp_path / "services" / "x"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# X\n")
    found = documents([Room(folder, rooms()[0].classes)], tmp_path)
    assert [problem.split(" needs ")[0] for problem in found.problems] == ["services/x/README.md"]
    assert list(found.texts) == [tmp_path / "docs" / "settings.md"]


def test_a_name_with_a_rooms_prefix_that_another_room_knows_is_not_refused():
    """OMNISERVE_LLM_ADDRESS begins with llm's prefix and belongs to those who call llm."""
    for cls in settings_docs.discover():
        if "llm_address" in cls.model_fields:
            assert load(cls, {"OMNISERVE_LLM_ADDRESS": "h:1"}).model_dump()["llm_address"] == "h:1"
            with pytest.raises(SettingsError):
                load(cls, {f"{cls.prefix()}NO_SUCH_KNOB_ANYWHERE": "1"})
