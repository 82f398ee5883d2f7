"""What a model file says about itself, whole, cut and damaged."""

import io
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.diffusion.core.family import check_lora, check_part, family_of, is_complete, upscaler_factor
from services.diffusion.core.header import Header, HeaderError, Tensor, read_header


def safetensors(shapes: dict[str, list[int]]) -> bytes:
    index, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 4
        for edge in shape:
            size *= edge
        index[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(index).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def gguf(tensors: dict[str, list[int]], *, kind: int = 0, version: int = 3) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 3)
    head += text("general.name") + struct.pack("<I", 8) + text("a name")
    head += text("general.alignment") + struct.pack("<II", 4, 64)
    head += text("numbers") + struct.pack("<IIQ", 9, 4, 2) + struct.pack("<II", 1, 2)
    end = 0
    for name, shape in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind, end)
        end += 4 * shape[0]
    head += bytes(-len(head) % 64)
    return head + bytes(end)


def read(data: bytes) -> Header:
    return read_header(io.BytesIO(data), len(data))


def header(*names: str, shapes: dict[str, tuple[int, ...]] | None = None) -> Header:
    tensors = {name: Tensor(name, (1,)) for name in names}
    return Header(tensors | {name: Tensor(name, shape) for name, shape in (shapes or {}).items()}, {})


def test_a_whole_file_of_either_format_tells_its_tensors():
    assert read(safetensors({"a.weight": [2, 3]})).tensors["a.weight"].shape == (2, 3)
    found = read(gguf({"a.weight": [8]}))
    assert found.tensors["a.weight"].shape == (8,)
    assert found.metadata == {"general.name": "a name"}


@pytest.mark.parametrize("whole", [safetensors({"a": [4, 4], "b": [7]}), gguf({"a": [16], "b": [8]})])
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(whole, data):
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(HeaderError):
        read(whole[:length])


@given(st.binary(max_size=200))
def test_whatever_a_file_holds_it_is_read_or_refused(data):
    for start in (b"", b"GGUF", b"GGUF\x03\0\0\0", struct.pack("<Q", max(2, len(data))) + b"{}"):
        try:
            read(start + data)
        except HeaderError:
            continue


def test_a_tensor_must_be_as_large_as_its_shape_says():
    data = safetensors({"a": [4]}).replace(b'"shape": [4]', b'"shape": [5]')
    with pytest.raises(HeaderError, match="as large as its shape"):
        read(data)


def test_an_unknown_version_of_gguf_is_named():
    with pytest.raises(HeaderError, match="version 9"):
        read(gguf({"a": [4]}, version=9))


def test_a_quantised_row_must_fill_its_blocks():
    with pytest.raises(HeaderError, match="blocks"):
        read(gguf({"a": [40]}, kind=2))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("model.diffusion_model.joint_blocks.0.x", "sd3"),
        ("double_blocks.0.img_mlp.gate_proj.weight", "ovis-image"),
        ("double_blocks.0.img_mod.lin.weight", "flux"),
        ("model.diffusion_model.cap_embedder.0.weight", "z-image"),
        ("model.diffusion_model.input_blocks.1.0.x", "sd1"),
        ("unet.down_blocks.0.x", "sd1"),
    ],
)
def test_a_family_is_known_by_its_tensors(name, family):
    assert family_of(header(name)).name == family


def test_families_that_differ_in_a_shape_or_one_part_are_told_apart():
    flux = "double_blocks.0.img_mod.lin.weight"
    assert family_of(header(flux, shapes={"img_in.weight": (3072, 384)})).name == "flux-fill"
    unet = "model.diffusion_model.input_blocks.0.0.weight"
    assert family_of(header(shapes={unet: (320, 9, 3, 3)})).name == "sd1-inpaint"
    assert family_of(header("model.diffusion_model.label_emb.0.0.weight", shapes={unet: (320, 4, 3, 3)})).name == "sdxl"
    attention = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
    assert family_of(header(shapes={unet: (320, 4, 3, 3), attention: (320, 1024)})).name == "sd2"


def test_other_kinds_of_model_are_refused_with_what_they_hold():
    with pytest.raises(HeaderError, match="video model"):
        family_of(header("model.diffusion_model.blocks.0.cross_attn.norm_k.weight"))
    with pytest.raises(HeaderError, match=r"no image model.*token_embd"):
        family_of(header("token_embd.weight"))
    with pytest.raises(HeaderError, match="no LoRA"):
        check_lora(header("double_blocks.0.img_attn.qkv.weight"))
    with pytest.raises(HeaderError, match="no vae"):
        check_part(header("token_embd.weight"), "vae")
    with pytest.raises(HeaderError, match="no ESRGAN"):
        upscaler_factor(header("token_embd.weight"))


def test_parts_adapters_and_upscalers_are_taken():
    check_lora(header("lora_unet_a.lora_down.weight"))
    check_part(header("decoder.conv_in.weight"), "vae")
    check_part(header("anything"), "llm_vision")
    assert is_complete(header("cond_stage_model.x"))
    assert not is_complete(header("model.diffusion_model.x"))
    assert upscaler_factor(header("conv_first.weight", "conv_last.weight", "conv_up1.weight")) == 2
    assert upscaler_factor(header("conv_first.weight", "conv_last.weight", "conv_up1.weight", "conv_up2.weight")) == 4
