"""The library that watches the engine, with types. It must be loaded before the engine; see native/."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FLOAT_BYTES: Final = 4
_REASON_BYTES: Final = 512


class NativeError(Exception):
    """The denoiser cannot be watched; the message says why."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The prompts of a generation. `context`: digest of all that decides how they are encoded beside them; empty: keep none."""

    prompt: str
    negative_prompt: str
    context: bytes


class Watch:
    """A watched generation, valid within its block. `calls`: denoising steps computed; `misfit`: the replay was of another size."""

    def __init__(self, library: ctypes.CDLL, run: int) -> None:
        self._library = library
        self._run = run

    def stop(self) -> None:
        """End the generation at its next step; from any thread."""
        self._library.tap_stop(self._run)

    @property
    def calls(self) -> int:
        """Steps that were computed."""
        return int(self._library.tap_calls(self._run))

    @property
    def misfit(self) -> bool:
        """Whether what was to be replayed did not fit."""
        return bool(self._library.tap_misfit(self._run))

    def prompts(self) -> tuple[int, int, int]:
        """Return how many prompts were encoded, how many were recalled instead, and how many others went for them."""
        encoded, recalled, evicted = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._library.tap_prompts_done(self._run, ctypes.byref(encoded), ctypes.byref(recalled), ctypes.byref(evicted))
        return encoded.value, recalled.value, evicted.value

    def kept_prompts(self) -> tuple[int, int]:
        """Return how many encoded prompts are kept, and their bytes."""
        entries, size = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.tap_prompts_kept(ctypes.byref(entries), ctypes.byref(size))
        return entries.value, size.value

    def recorded(self) -> tuple[bytes, int]:
        """Return the results that were kept, one after the other, and how many they are."""
        blocks, block = ctypes.c_size_t(), ctypes.c_size_t()
        data = self._library.tap_recorded(self._run, ctypes.byref(blocks), ctypes.byref(block))
        size = blocks.value * block.value * _FLOAT_BYTES
        return (ctypes.string_at(data, size) if size else b""), blocks.value


class Native:
    """The loaded library. Load it first, then the engine, then bind."""

    def __init__(self, path: str) -> None:
        """Load it. Raises NativeError."""
        if not path or not Path(path).exists():
            raise NativeError("it was not built: `make setup` does that when a C++ compiler is there")
        try:
            library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            sizes = (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))
            library.tap_bind.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
            library.tap_new.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
            library.tap_new.restype = ctypes.c_void_p
            library.tap_recorded.restype = ctypes.c_void_p
            library.tap_recorded.argtypes = (ctypes.c_void_p, *sizes)
            library.tap_prompts_kept.argtypes = sizes
            library.tap_bind_prompts.argtypes = (
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_size_t,
                ctypes.c_char_p,
                ctypes.c_size_t,
            )
            library.tap_prompts.argtypes = (
                ctypes.c_void_p,
                ctypes.c_char_p,
                ctypes.c_size_t,
                ctypes.c_char_p,
                ctypes.c_char_p,
            )
            library.tap_prompts_done.argtypes = (ctypes.c_void_p, *(ctypes.POINTER(ctypes.c_int),) * 3)
            for name in ("tap_enter", "tap_stop", "tap_calls", "tap_misfit", "tap_delete"):
                getattr(library, name).argtypes = (ctypes.c_void_p,)
        except (OSError, AttributeError) as error:
            raise NativeError(f"it cannot be loaded: {error}") from error
        self._library = library

    def bind(self, engine: int) -> None:
        """Prove that the engine, by its library's handle, is watched. Raises NativeError."""
        reason = ctypes.create_string_buffer(_REASON_BYTES)
        if not self._library.tap_bind(engine, reason, _REASON_BYTES):
            raise NativeError(reason.value.decode("utf-8", "replace"))

    def bind_prompts(self, engine: int, most: int, most_bytes: int) -> None:
        """Prove that the engine's encoded prompts can be kept, and keep so many from now on. Raises NativeError."""
        if most == 0:
            raise NativeError("OMNISERVE_SD_TELEPORT_CACHE_SIZE is 0")
        reason = ctypes.create_string_buffer(_REASON_BYTES)
        if not self._library.tap_bind_prompts(engine, most, most_bytes, reason, _REASON_BYTES):
            raise NativeError(reason.value.decode("utf-8", "replace"))

    def forget_prompts(self) -> None:
        """Keep none of the encoded prompts; from any thread."""
        self._library.tap_prompts_clear()

    @contextmanager
    def watch(self, *, replay: bytes, blocks: int, record_steps: int, texts: Texts) -> Iterator[Watch]:
        """Watch what this thread generates within the block. `replay`: so many results of the first calls."""
        block = len(replay) // _FLOAT_BYTES // blocks if blocks else 0
        run = self._library.tap_new(replay, blocks, block, record_steps)
        prompts = (each.encode() for each in (texts.prompt, texts.negative_prompt))
        self._library.tap_prompts(run, texts.context, len(texts.context), *prompts)
        self._library.tap_enter(run)
        try:
            yield Watch(self._library, run)
        finally:
            self._library.tap_leave()
            self._library.tap_delete(run)
