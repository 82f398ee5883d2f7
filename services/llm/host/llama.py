"""llama.cpp for the rest of the house: the one module that touches its C API, with types and without surprises.

A model and its context belong to one thread. A NULL pointer becomes LlamaError, with what llama.cpp logged about it.
"""

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import llama_cpp as api
import numpy as np
import numpy.typing as npt

from services.llm.core.placement import Device

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
_GPU_TYPES: Final = frozenset({1, 2})  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU
_WARNING: Final = 3  # GGML_LOG_LEVEL_WARN
_CONTINUED: Final = 5  # GGML_LOG_LEVEL_CONT

DECODED: Final = 0
NO_ROOM: Final = 1
ABORTED: Final = 2

_lib = api.llama_cpp._lib  # noqa: SLF001 - ggml's own functions have no binding


class LlamaError(Exception):
    """llama.cpp refused or failed."""


class _Log:
    """Hears llama.cpp while it loads: passes warnings on to stderr and remembers what may explain a failure."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=400)
        self._level = 0
        self._callback = api.llama_log_callback(self._take)
        # While steps are computed nobody listens: the callback would stop the computing threads for every line of
        # debugging. abs() is a C function that ignores all but its first argument.
        self._silence = ctypes.cast(ctypes.CDLL(None).abs, api.llama_log_callback)

    def _take(self, level: int, text: bytes, _data: Any) -> None:  # noqa: ANN401 - a C pointer
        self._level = self._level if level == _CONTINUED else level
        line = text.decode("utf-8", "replace")
        self.lines.append(line)
        if self._level >= _WARNING:
            sys.stderr.write(line)

    def listen(self) -> None:
        api.llama_log_set(self._callback, None)

    def ignore(self) -> None:
        api.llama_log_set(self._silence, None)

    def complaint(self) -> str:
        """Return the first of the last lines that reads like an error."""
        bad = (line.strip() for line in self.lines if "error" in line.lower() or "failed" in line.lower())
        return next(bad, "llama.cpp gave no reason")


_log = _Log()


def start_backend() -> None:
    """Load llama.cpp's backends; once per process, before anything else."""
    _log.listen()
    api.llama_backend_init()


def stop_listening() -> None:
    """Hear nothing more from llama.cpp's log; call it when everything is loaded."""
    _log.ignore()


def gpus() -> list[Device]:
    """Return the GPUs that a registered backend can compute on, with their memory now."""
    _lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    _lib.ggml_backend_dev_get.restype = ctypes.c_void_p
    _lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    _lib.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    _lib.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    _lib.ggml_backend_dev_description.restype = ctypes.c_char_p
    _lib.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    found = []
    for index in range(_lib.ggml_backend_dev_count()):
        device = _lib.ggml_backend_dev_get(index)
        if _lib.ggml_backend_dev_type(device) not in _GPU_TYPES:
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = _lib.ggml_backend_dev_description(device).decode("utf-8", "replace")
        found.append(Device(name, free.value, total.value))
    return found


class Vocabulary:
    """A model's tokens."""

    def __init__(self, pointer: Any) -> None:  # noqa: ANN401 - a C pointer
        self.pointer = pointer
        self.size: int = api.llama_vocab_n_tokens(pointer)
        self.bos: int = api.llama_vocab_bos(pointer)
        self.eos: int = api.llama_vocab_eos(pointer)
        self.adds_bos: bool = api.llama_vocab_get_add_bos(pointer)
        self._buffer = ctypes.create_string_buffer(512)

    def tokenize(self, text: bytes, *, parse_special: bool) -> list[int]:
        """Return the tokens of a text; nothing is added at its ends."""
        room = len(text) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count: int = api.llama_tokenize(self.pointer, text, len(text), tokens, room, False, parse_special)  # noqa: FBT003
            if count >= 0:
                return tokens[:count]
            room = -count

    def piece(self, token: int, *, special: bool) -> bytes:
        """Return a token's bytes; a control token has none unless `special`."""
        size: int = api.llama_token_to_piece(self.pointer, token, self._buffer, len(self._buffer), 0, special)
        if size < 0:
            self._buffer = ctypes.create_string_buffer(-size)
            size = api.llama_token_to_piece(self.pointer, token, self._buffer, len(self._buffer), 0, special)
        return self._buffer.raw[:size]

    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end a generation."""
        return tuple(token for token in range(self.size) if api.llama_vocab_is_eog(self.pointer, token))

    def suppressed(self) -> tuple[int, ...]:
        """Return the tokens that the model's file says must never be generated."""
        count = ctypes.c_int32()
        tokens = api.llama_vocab_get_suppress_tokens(self.pointer, ctypes.byref(count))
        return tuple(tokens[: count.value])


class Model:
    """A loaded model file."""

    def __init__(self, pointer: Any) -> None:  # noqa: ANN401 - a C pointer
        self.pointer = pointer
        self.vocabulary = Vocabulary(api.llama_model_get_vocab(pointer))
        self.context_tokens: int = api.llama_model_n_ctx_train(pointer)
        self.layers: int = api.llama_model_n_layer(pointer)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        gpu_layers: int = 0,
        vocabulary_only: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> "Model":
        """Load a file whose header has been checked. Raises LlamaError."""
        params = api.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.vocab_only = vocabulary_only

        def report(done: float, _data: Any) -> bool:  # noqa: ANN401 - a C pointer
            if progress is not None:
                progress(done)
            return True

        callback = api.llama_progress_callback(report)
        params.progress_callback = callback
        pointer = api.llama_model_load_from_file(path.encode(), params)
        if not pointer:
            raise LlamaError(f"llama.cpp cannot load {path}: {_log.complaint()}")
        return cls(pointer)

    @property
    def shares_prefixes(self) -> bool:
        """Whether the beginning of a sequence can be given to another: plain attention over the whole past only."""
        kinds = (api.llama_model_is_recurrent, api.llama_model_is_hybrid)
        return not any(kind(self.pointer) for kind in kinds) and int(api.llama_model_n_swa(self.pointer)) == 0

    def template(self) -> str | None:
        """Return the chat template that the file carries."""
        text = api.llama_model_chat_template(self.pointer, None)
        return text.decode("utf-8", "replace") if text else None


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

    def add_chunk(self, tokens: Tokens, position: int, sequence: int, *, output: bool) -> None:
        """Add consecutive tokens; `output`: the last one's output is wanted."""
        at = self.struct.n_tokens
        end = at + len(tokens)
        self.token[at:end] = tokens
        self.position[at:end] = np.arange(position, position + len(tokens), dtype=np.int32)
        self.sequence[at:end] = sequence
        self.output[at:end] = 0
        if output:
            self.output[end - 1] = 1
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
        _log.lines.clear()
        self._pointer = api.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise LlamaError(f"no context of {cells} cells: {_log.complaint()}")
        self._memory = api.llama_get_memory(self._pointer)
        self._vocabulary = model.vocabulary.size
        self._views: dict[int, Floats] = {}
        self.cells: int = api.llama_n_ctx(self._pointer)
        self.flash_attention = any("FLASH_ATTN_EXT" in line for line in _log.lines)
        self.threads = threads
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

    def save(self, sequence: int) -> bytes:
        """Return a sequence's state, for `restore`."""
        size = api.llama_state_seq_get_size(self._pointer, sequence)
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

    def close(self) -> None:
        """Free the samplers."""
        api.llama_sampler_free(self._pointer)


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:  # noqa: ANN401 - ctypes has no better type
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
