"""Adapters: names that are none, links, races, and what the engine gets to read."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.diffusion.adapters.lora_files import LoraFiles
from services.diffusion.core.loras import check_loras
from services.diffusion.core.options import AskedLora
from services.kit.errors import DomainError, Reason


def lora(seed: int = 0) -> bytes:
    index = b'{"lora_unet_a.lora_down.weight":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    return struct.pack("<Q", len(index)) + index + bytes([seed])


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "loras"
    (root / "style").mkdir(parents=True)
    (root / "many").mkdir()
    (root / "plain.safetensors").write_bytes(lora(1))
    (root / "style" / "one.safetensors").write_bytes(lora(2))
    (root / "many" / "a.safetensors").write_bytes(lora(3))
    (root / "many" / "b.safetensors").write_bytes(lora(4))
    (tmp_path / "secret.safetensors").write_bytes(lora(9))
    return root


@pytest.fixture
def files(folder, tmp_path):
    return LoraFiles(folder, tmp_path / "copies")


def named(*asked: AskedLora, operator: bool = False):
    return check_loras(asked, has_folder=True, is_operator=operator)


def refused(*asked: AskedLora, operator: bool = False) -> DomainError:
    with pytest.raises(DomainError) as caught:
        named(*asked, operator=operator)
    return caught.value


def missed(files: LoraFiles, *asked: AskedLora, operator: bool = False) -> DomainError:
    with pytest.raises(DomainError) as caught:
        files.find(named(*asked, operator=operator))
    return caught.value


def test_an_adapter_is_found_by_its_id_by_its_file_and_in_its_folder(files):
    ids = (AskedLora("plain"), AskedLora("style"), AskedLora("many", "b.safetensors"))
    found = files.find(named(*ids))
    assert [Path(each.path).read_bytes() for each in found] == [lora(1), lora(2), lora(4)]
    assert files.find(named(AskedLora("plain.safetensors")))[0].digest == found[0].digest


@pytest.mark.parametrize(
    "lora_id",
    [
        "",
        ".",
        "..",
        "../secret",
        "..\\secret",
        "style/one.safetensors",
        "/etc/passwd",
        ".hidden",
        "a\0b",
        "a\nb",
        "x" * 201,
        "pla\u200bin",  # a space that is not seen
        "\u202eplain",  # turns the direction of writing
        "\uff0e\uff0e",  # dots that Unicode's normal form turns into dots
        "ｐlain",
        "pla\u0131n\u0307",
        "plain\u2215secret",
    ],
)
def test_what_is_no_plain_name_is_refused_or_never_found(files, lora_id):
    with pytest.raises(DomainError) as caught:
        files.find(named(AskedLora(lora_id)))
    assert caught.value.reason in {Reason.INVALID_REQUEST, Reason.NOT_FOUND}
    assert (caught.value.field or "").startswith("options.loras[0]")


@given(st.text(max_size=30))
def test_no_name_leads_out_of_the_folder(name):
    try:
        (found,) = named(AskedLora(name))
    except DomainError:
        return
    assert "/" not in found.lora_id
    assert not found.lora_id.startswith(".")


def test_links_lead_nowhere(files, folder, tmp_path):
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "style" / "inner.safetensors").symlink_to(tmp_path / "secret.safetensors")
    for asked in (
        AskedLora("link"),
        AskedLora("linked", "secret.safetensors"),
        AskedLora("style", "inner.safetensors"),
    ):
        assert missed(files, asked).reason is Reason.NOT_FOUND


def test_what_is_no_file_is_never_waited_for(files, folder):
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "folder.safetensors").mkdir()
    assert missed(files, AskedLora("pipe")).reason is Reason.NOT_FOUND
    assert missed(files, AskedLora("folder")).reason is Reason.NOT_FOUND


def test_a_file_swapped_after_the_look_changes_nothing(files, folder):
    (found,) = files.find(named(AskedLora("plain")))
    (folder / "plain.safetensors").unlink()
    (folder / "plain.safetensors").symlink_to("/etc/passwd")
    assert Path(found.path).read_bytes() == lora(1)
    assert missed(files, AskedLora("plain")).reason is Reason.NOT_FOUND


def test_a_changed_file_has_another_digest_and_an_unchanged_one_is_copied_once(files, folder):
    (before,) = files.find(named(AskedLora("plain")))
    made = Path(before.path).stat().st_mtime_ns
    (same,) = files.find(named(AskedLora("plain")))
    assert Path(same.path).stat().st_mtime_ns == made
    (folder / "plain.safetensors").write_bytes(lora(7))
    (after,) = files.find(named(AskedLora("plain")))
    assert after.digest != before.digest


def test_a_damaged_adapter_is_refused_and_leaves_no_copy(files, folder, tmp_path):
    (folder / "cut.safetensors").write_bytes(lora(1)[:-1])
    (folder / "other.safetensors").write_bytes(b"GGUF" + bytes(60))
    for name in ("cut", "other"):
        error = missed(files, AskedLora(name))
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "options.loras[0]")
    assert list((tmp_path / "copies").iterdir()) == []


def test_a_folder_of_several_wants_a_file_s_name(files):
    assert "2 adapters" in missed(files, AskedLora("many")).message


def test_paths_are_for_the_operator_and_absolute(files, tmp_path):
    secret = str(tmp_path / "secret.safetensors")
    assert refused(AskedLora(path=secret)).field == "options.loras[0].path"
    assert refused(AskedLora(path="secret"), operator=True).field == "options.loras[0].path"
    (found,) = files.find(named(AskedLora(path=secret, scale=0.5), operator=True))
    assert (Path(found.path).read_bytes(), found.scale) == (lora(9), 0.5)


def test_at_most_eight_each_once_with_a_strength_that_makes_sense():
    assert refused(*(AskedLora(f"l{number}") for number in range(9))).field == "options.loras"
    assert refused(AskedLora("a"), AskedLora("a")).field == "options.loras[1]"
    assert refused(AskedLora("a", scale=float("nan"))).field == "options.loras[0].scale"
    assert refused(AskedLora("a", "b.exe")).field == "options.loras[0].catalogue.filename"


def test_without_a_folder_the_refusal_names_the_setting():
    with pytest.raises(DomainError) as caught:
        check_loras([AskedLora("a")], has_folder=False, is_operator=True)
    assert caught.value.reason is Reason.UNSUPPORTED
    assert "OMNISERVE_LORA_DIR" in caught.value.message


def test_copies_of_a_former_process_are_gone(folder, tmp_path):
    copies = tmp_path / "copies"
    (first,) = LoraFiles(folder, copies).find(named(AskedLora("plain")))
    LoraFiles(folder, copies)
    assert not Path(first.path).exists()


def test_only_so_many_copies_are_kept(files, folder, tmp_path):
    for number in range(40):
        (folder / "plain.safetensors").write_bytes(lora(number))
        (found,) = files.find(named(AskedLora("plain")))
        assert Path(found.path).exists()
    assert len(list((tmp_path / "copies").iterdir())) <= 32
