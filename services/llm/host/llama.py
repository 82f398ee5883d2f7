"""llama.cpp's library, models and vocabularies, with types: a NULL pointer becomes LlamaError with what was logged."""

import ctypes
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from services.llm.core.embedding import PairEnds
from services.llm.core.placement import Device
from services.llm.host.bindings import api

_GPU_TYPES: Final = frozenset({1, 2})  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU
_WARNING: Final = 3  # GGML_LOG_LEVEL_WARN
_CONTINUED: Final = 5  # GGML_LOG_LEVEL_CONT

_lib = api._lib  # noqa: SLF001 - ggml's own functions have no binding


class LlamaError(Exception):
    """llama.cpp refused or failed."""


class Log:
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
        """Hear everything."""
        api.llama_log_set(self._callback, None)

    def ignore(self) -> None:
        """Hear nothing."""
        api.llama_log_set(self._silence, None)

    def complaint(self) -> str:
        """Return the first of the last lines that reads like an error."""
        bad = (line.strip() for line in self.lines if "error" in line.lower() or "failed" in line.lower())
        return next(bad, "llama.cpp gave no reason")


log = Log()


def start_backend() -> None:
    """Load llama.cpp's backends; once per process, before anything else."""
    log.listen()
    api.llama_backend_init()


def stop_listening() -> None:
    """Hear nothing more from llama.cpp's log; call it when everything is loaded."""
    log.ignore()


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
        self.sep: int = api.llama_vocab_sep(pointer)
        self.adds_bos: bool = api.llama_vocab_get_add_bos(pointer)
        self._buffer = ctypes.create_string_buffer(512)

    def tokenize(self, text: bytes, *, parse_special: bool, add_special: bool = False) -> list[int]:
        """Return the tokens of a text; with `add_special` between those that the model wants at its ends."""
        room = len(text) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count: int = api.llama_tokenize(self.pointer, text, len(text), tokens, room, add_special, parse_special)
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

    def pair_ends(self) -> PairEnds:
        """Return what stands around and between a query and a document."""
        last = self.eos if self.eos >= 0 else self.sep
        adds_last: bool = api.llama_vocab_get_add_eos(self.pointer)
        adds_sep: bool = api.llama_vocab_get_add_sep(self.pointer)
        after = (last,) if adds_last else ()
        return PairEnds(
            before=(self.bos,) if self.adds_bos else (),
            between=(*after, *((self.sep,) if adds_sep else ())),
            after=after,
        )

    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end a generation."""
        return tuple(token for token in range(self.size) if api.llama_vocab_is_eog(self.pointer, token))

    def infill(self) -> tuple[int, int, int] | None:
        """Return the tokens before the beginning, before the end and before the gap of a text; None without any."""
        found = (
            api.llama_vocab_fim_pre(self.pointer),
            api.llama_vocab_fim_suf(self.pointer),
            api.llama_vocab_fim_mid(self.pointer),
        )
        return found if min(found) >= 0 else None

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
            raise LlamaError(f"llama.cpp cannot load {path}: {log.complaint()}")
        return cls(pointer)

    @property
    def shares_prefixes(self) -> bool:
        """Whether the beginning of a sequence can be given to another: plain attention over the whole past only."""
        kinds = (api.llama_model_is_recurrent, api.llama_model_is_hybrid)
        return not any(kind(self.pointer) for kind in kinds) and int(api.llama_model_n_swa(self.pointer)) == 0

    def template(self, name: str | None = None) -> str | None:
        """Return the template of that name which the file carries; None is the one for chats."""
        text = api.llama_model_chat_template(self.pointer, name.encode() if name is not None else None)
        return text.decode("utf-8", "replace") if text else None
