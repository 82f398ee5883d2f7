import json

from services.admission.adapters.memory_file import MemoryFile
from services.admission.core.desk import Memory
from services.admission.core.model import ALL_MODALITIES, Hold, Modality
from services.admission.core.remains import Use

USE = Use("llm", "gpu0", Modality.LLM, 2)
HOLD = Hold("h", frozenset({"gpu0", "cpu"}), frozenset({Modality.IMAGE}), 130.0, "hand-over")


def test_what_is_written_is_read_back_on_the_clock_of_the_next_process(tmp_path):
    before = MemoryFile(tmp_path / "state" / "admission.json", ahead_s=1_000.0)
    before.write(4, Memory((("s1", "llm"),), (HOLD,), (USE,)))
    epoch, memory = MemoryFile(tmp_path / "state" / "admission.json", ahead_s=1_100.0).read()
    assert epoch == 4
    assert memory.sessions == (("s1", "llm"),)
    assert memory.uses == (USE,)
    [hold] = memory.holds
    assert hold == Hold("h", HOLD.pools, HOLD.modalities, 30.0, "hand-over")


def test_a_first_start_has_no_past(tmp_path):
    assert MemoryFile(tmp_path / "admission.json", ahead_s=0.0).read() == (0, Memory((), ()))


def test_a_file_that_cannot_be_read_is_set_aside_and_epochs_still_grow(tmp_path):
    path = tmp_path / "admission.json"
    for text in ("", "{", "[]", '{"epoch": 3}', '{"epoch": 3, "sessions": [1], "holds": []}'):
        path.write_text(text)
        epoch, memory = MemoryFile(path, ahead_s=0.0).read()
        assert memory == Memory((), ())
        assert epoch > 1_000_000_000
        assert not path.exists()
        assert path.with_suffix(".unreadable").read_text() == text


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path):
    file = MemoryFile(tmp_path / "admission.json", ahead_s=0.0)
    for epoch in (1, 2):
        file.write(epoch, Memory((), (Hold("h", frozenset({"gpu0"}), ALL_MODALITIES, 9.0, ""),)))
    assert [each.name for each in tmp_path.iterdir()] == ["admission.json"]
    assert json.loads((tmp_path / "admission.json").read_text())["epoch"] == 2
