"""The kernel's page cache: telling it what will be read, and asking how much of a file it has."""

import ctypes
import mmap
import os
from typing import Final

_libc: Final = ctypes.CDLL(None, use_errno=True)
_WINDOW_BYTES: Final = 1024**3
"""How much of a file is looked at at once."""


def advise(path: str, start: int, size: int) -> None:
    """Have a part of a file read ahead. Nothing is pinned, and nothing is copied. Raises OSError."""
    with open(path, "rb") as file:  # noqa: PTH123 - only its descriptor is wanted
        os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)


def cached_bytes(path: str) -> int:
    """Return how much of a file is in the page cache. Raises OSError."""
    found = 0
    with open(path, "rb") as file:  # noqa: PTH123 - only its descriptor is wanted
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, _WINDOW_BYTES):
            found += _cached_in(file.fileno(), start, min(_WINDOW_BYTES, size - start))
    return min(found, size)


def _cached_in(descriptor: int, start: int, size: int) -> int:
    # A private mapping: only such a one lends its address, and nothing is written.
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=start) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        try:
            pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
            if _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages) != 0:
                raise OSError(ctypes.get_errno(), "mincore failed")
            return bytes(pages).count(1) * mmap.PAGESIZE
        finally:
            del first
