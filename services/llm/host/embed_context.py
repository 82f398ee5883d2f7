"""A llama.cpp context that makes one vector of each sequence.

It belongs to one thread; only `set_abort` may be called from another.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from services.llm.host.bindings import api
from services.llm.host.context import ABORTED, DECODED, Batch, Tokens
from services.llm.host.llama import LlamaError, Model, log

POOLINGS: Final[Mapping[str, int]] = {
    "mean": api.LLAMA_POOLING_TYPE_MEAN,
    "cls": api.LLAMA_POOLING_TYPE_CLS,
    "last": api.LLAMA_POOLING_TYPE_LAST,
    "rank": api.LLAMA_POOLING_TYPE_RANK,
}
_FLOAT_BYTES: Final = 4


class EmbedContext:
    """One context. A step takes whole sequences and leaves nothing behind, so no sequence can see another.

    `tokens`: room of a step. `pooling`: a key of POOLINGS, or empty for what the file says, mean when it says nothing.
    `flash`: flash attention where llama.cpp likes it. On a CPU that sums up in 16 bits for small steps and in 32 for others,
    so that vectors of one text differ more from step to step; without it, memory grows with the square of `tokens`.
    """

    def __init__(self, model: Model, *, tokens: int, sequences: int, threads: int, pooling: str, flash: bool) -> None:
        log.lines.clear()
        params = _params(tokens, sequences, threads, flash=flash)
        self._pointer = _open(model, params, pooling)
        if not pooling and api.llama_pooling_type(self._pointer) not in POOLINGS.values():
            api.llama_free(self._pointer)
            self._pointer = _open(model, params, "mean")
        kind = api.llama_pooling_type(self._pointer)
        self.pooling = next(name for name, number in POOLINGS.items() if number == kind)
        width_of = api.llama_model_n_cls_out if self.pooling == "rank" else api.llama_model_n_embd_out
        self.width: int = width_of(model.pointer)
        self.threads = threads
        self.tokens = tokens
        self.sequences = sequences
        self.flash_attention = any("FLASH_ATTN_EXT" in line for line in log.lines)
        self._batch = Batch(tokens)
        self._memory = api.llama_get_memory(self._pointer)
        # See Context: the question whether to abort is answered by C's strlen of this buffer.
        self._abort = ctypes.create_string_buffer(2)
        self._abort_callback = ctypes.cast(ctypes.CDLL(None).strlen, api.ggml_abort_callback)
        api.llama_set_abort_callback(self._pointer, self._abort_callback, ctypes.addressof(self._abort))

    def compute(self, inputs: Sequence[Tokens]) -> list[bytes] | None:
        """Return the vector of each input as raw floats, None when aborted. Raises LlamaError.

        The inputs must fit into `tokens` and `sequences`.
        """
        batch = self._batch
        batch.begin()
        for sequence, tokens in enumerate(inputs):
            batch.add_chunk(tokens, 0, sequence, outputs=1)
        batch.output[: batch.size] = 1  # pooling looks at every token
        result = int(api.llama_decode(self._pointer, batch.struct))
        if result == ABORTED:
            self._forget()
            return None
        if result != DECODED:
            raise LlamaError(f"llama_decode returned {result} for {batch.size} tokens of {len(inputs)} inputs")
        size = self.width * _FLOAT_BYTES
        vectors = [
            ctypes.string_at(api.llama_get_embeddings_seq(self._pointer, sequence), size)
            for sequence in range(len(inputs))
        ]
        self._forget()
        return vectors

    def set_abort(self, abort: bool) -> None:  # noqa: FBT001 - reads as a sentence
        """Say whether the running step is to be given up; callable from any thread."""
        self._abort[0] = b"\1" if abort else b"\0"

    def _forget(self) -> None:
        """Empty the cache, which decoder models have and encoders lack."""
        if self._memory:
            api.llama_memory_clear(self._memory, False)  # noqa: FBT003 - llama.cpp's own signature


def _params(tokens: int, sequences: int, threads: int, *, flash: bool) -> Any:  # noqa: ANN401 - a C struct
    params = api.llama_context_default_params()
    # Encoders see an input as a whole or not at all, so a step is one physical batch.
    params.n_ctx = params.n_batch = params.n_ubatch = tokens
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = True
    params.embeddings = True
    params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_AUTO if flash else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.no_perf = True
    return params


def _open(model: Model, params: Any, pooling: str) -> Any:  # noqa: ANN401 - a C struct, a C pointer
    params.pooling_type = POOLINGS[pooling] if pooling else api.LLAMA_POOLING_TYPE_UNSPECIFIED
    pointer = api.llama_init_from_model(model.pointer, params)
    if not pointer:
        how = pooling or "as the file says"
        raise LlamaError(f"no context for {params.n_ctx} tokens with pooling {how}: {log.complaint()}")
    return pointer


def warm_up(context: EmbedContext, token: int) -> None:
    """Compute once, so that the first request does not pay for what is set up lazily."""
    context.compute([np.array([token], np.int32)])
