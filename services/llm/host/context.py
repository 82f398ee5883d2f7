"""A llama.cpp context, its batches and its samplers. They belong to one thread; only `set_abort` may come from another."""

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.llm.host.bindings import api
from services.llm.host.llama import LlamaError, Model, log

Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

KV_TYPES: Final = {
    "f32": api.GGML_TYPE_F32,
    "f16": api.GGML_TYPE_F16,
    "bf16": 30,  # the binding has no name for it
    "q8_0": api.GGML_TYPE_Q8_0,
    "q5_1": api.GGML_TYPE_Q5_1,
    "q5_0": api.GGML_TYPE_Q5_0,
    "q4_1": api.GGML_TYPE_Q4_1,
    "q4_0": api.GGML_TYPE_Q4_0,
    "iq4_nl": api.GGML_TYPE_IQ4_NL,
}
_FLASH: Final = {
    "auto": api.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": api.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": api.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
TOKEN_DATA: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data."""
DECODED: Final = 0
NO_ROOM: Final = 1
ABORTED: Final = 2


class Batch:
    """The tokens of one step, written through numpy: `token`, `position`, `sequence` and `output`, one entry each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.token = np.zeros(capacity, np.int32)
        self.position = np.zeros(capacity, np.int32)
        self.sequence = np.zeros(capacity, np.int32)
        self.output = np.zeros(capacity, np.int8)
        self._counts = np.ones(capacity, np.int32)
        # llama.cpp wants a pointer to each token's list of sequences: here, to its place in `sequence`.
        first = self.sequence.ctypes.data
        self._lists = np.arange(first, first + 4 * capacity, 4, dtype=np.uintp)
        self.struct = api.llama_batch(
            n_tokens=0,
            token=_pointer(self.token, ctypes.c_int32),
            embd=None,
            pos=_pointer(self.position, ctypes.c_int32),
            n_seq_id=_pointer(self._counts, ctypes.c_int32),
            seq_id=ctypes.cast(self._lists.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=_pointer(self.output, ctypes.c_int8),
        )

    def begin(self) -> None:
        """Empty the batch."""
        self.struct.n_tokens = 0

    @property
    def size(self) -> int:
        """Tokens in it."""
        return int(self.struct.n_tokens)

    def add_one(self, token: int, position: int, sequence: int) -> None:
        """Add a token whose output is wanted."""
        at = self.struct.n_tokens
        self.token[at] = token
        self.position[at] = position
        self.sequence[at] = sequence
        self.output[at] = 1
        self.struct.n_tokens = at + 1

    def add_chunk(self, tokens: Tokens, position: int, sequence: int, *, outputs: int) -> None:
        """Add consecutive tokens; the outputs of so many of the last ones are wanted."""
        at = self.struct.n_tokens
        end = at + len(tokens)
        self.token[at:end] = tokens
        self.position[at:end] = np.arange(position, position + len(tokens), dtype=np.int32)
        self.sequence[at:end] = sequence
        self.output[at:end] = 0
        self.output[end - outputs : end] = 1
        self.struct.n_tokens = end


class Context:
    """One context over one unified KV cache."""

    def __init__(
        self,
        model: Model,
        *,
        cells: int,
        sequences: int,
        batch_tokens: int,
        ubatch_tokens: int,
        threads: int,
        kv_type: str,
        flash_attention: str,
    ) -> None:
        params = api.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = batch_tokens
        params.n_ubatch = min(ubatch_tokens, batch_tokens)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.type_k = params.type_v = KV_TYPES[kv_type]
        params.flash_attn_type = _FLASH[flash_attention]
        params.no_perf = True
        log.lines.clear()
        self._pointer = api.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise LlamaError(f"no context of {cells} cells: {log.complaint()}")
        self._memory = api.llama_get_memory(self._pointer)
        self._vocabulary = model.vocabulary.size
        self._views: dict[int, Floats] = {}
        self.cells: int = api.llama_n_ctx(self._pointer)
        self.flash_attention = any("FLASH_ATTN_EXT" in line for line in log.lines)
        self.threads = threads
        self.batch_tokens = batch_tokens
        self.ubatch_tokens = params.n_ubatch
        # llama.cpp asks after every operation whether to abort. A Python callback would need the interpreter's lock
        # hundreds of times per step, so the question is put to C: strlen of this buffer is 0 (go on) or 1 (abort).
        self._abort = ctypes.create_string_buffer(2)
        self._abort_callback = ctypes.cast(ctypes.CDLL(None).strlen, api.ggml_abort_callback)
        api.llama_set_abort_callback(self._pointer, self._abort_callback, ctypes.addressof(self._abort))

    @property
    def pointer(self) -> Any:  # noqa: ANN401 - a C pointer
        """The context, for samplers."""
        return self._pointer

    def decode(self, batch: Batch) -> int:
        """Compute a batch and wait for it. Returns DECODED, NO_ROOM or ABORTED; raises LlamaError on anything else."""
        result = int(api.llama_decode(self._pointer, batch.struct))
        if result not in (DECODED, NO_ROOM, ABORTED):
            raise LlamaError(f"llama_decode returned {result} for {batch.size} tokens")
        return result

    def logits(self, rows: int) -> Floats:
        """Return the outputs of the last step, one row per token whose output was wanted; valid until the next step."""
        pointer = api.llama_get_logits(self._pointer)
        address = ctypes.addressof(pointer.contents)
        view = self._views.get(address)
        if view is None or len(view) < rows:
            view = np.ctypeslib.as_array(pointer, (rows, self._vocabulary))
            self._views = {address: view}
        return view

    def set_abort(self, abort: bool) -> None:  # noqa: FBT001 - reads as a sentence
        """Say whether the running step is to be given up; callable from any thread."""
        self._abort[0] = b"\1" if abort else b"\0"

    def set_threads(self, threads: int) -> None:
        """Compute with this many threads from the next step on."""
        if threads != self.threads:
            api.llama_set_n_threads(self._pointer, threads, threads)
            self.threads = threads

    def share(self, source: int, target: int, length: int) -> None:
        """Let an empty sequence begin with the first tokens of another."""
        api.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def cut(self, sequence: int, length: int) -> None:
        """Keep only the first tokens of a sequence; 0 drops it."""
        if not api.llama_memory_seq_rm(self._memory, sequence, length or -1, -1):
            raise LlamaError(f"sequence {sequence} cannot be cut to {length} tokens")

    def state_bytes(self, sequence: int) -> int:
        """Return how large a sequence's state is."""
        return int(api.llama_state_seq_get_size(self._pointer, sequence))

    def save(self, sequence: int) -> bytes:
        """Return a sequence's state, for `restore`."""
        size = self.state_bytes(sequence)
        buffer = (ctypes.c_uint8 * size)()
        written = api.llama_state_seq_get_data(self._pointer, buffer, size, sequence)
        return bytes(memoryview(buffer)[:written])

    def restore(self, sequence: int, state: bytes) -> bool:
        """Put a saved state into an empty sequence; False when there is no room."""
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        return int(api.llama_state_seq_set_data(self._pointer, buffer, len(state), sequence)) > 0


class Chain:
    """A chain of llama.cpp's samplers."""

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._pointer = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        for sampler in samplers:
            if not sampler:
                raise LlamaError("llama.cpp refused a sampler")
            api.llama_sampler_chain_add(self._pointer, sampler)

    def accept(self, token: int) -> None:
        """Tell the samplers that look back about a token that was not sampled here."""
        api.llama_sampler_accept(self._pointer, token)

    def sample(self, context: Context, row: int) -> int:
        """Choose a token from the output of the batch's entry `row`, and remember it."""
        return int(api.llama_sampler_sample(self._pointer, context.pointer, row))

    def pick(self, logits: Floats) -> int:
        """Choose a token from logits, without remembering it."""
        entries = np.zeros(len(logits), TOKEN_DATA)
        entries["id"] = np.arange(len(logits), dtype=np.int32)
        entries["logit"] = logits
        struct = token_data(entries)
        api.llama_sampler_apply(self._pointer, ctypes.byref(struct))
        return int(struct.data[struct.selected].id)

    def close(self) -> None:
        """Free the samplers."""
        api.llama_sampler_free(self._pointer)


def token_data(entries: npt.NDArray[Any]) -> Any:  # noqa: ANN401 - a C struct
    """Return an array of TOKEN_DATA as llama.cpp's samplers take it; it must outlive the struct."""
    data = ctypes.cast(entries.ctypes.data, ctypes.POINTER(api.llama_token_data))
    return api.llama_token_data_array(data=data, size=len(entries), selected=-1, sorted=False)


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:  # noqa: ANN401 - ctypes has no better type
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
