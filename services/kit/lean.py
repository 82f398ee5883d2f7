"""Imports without what no service uses: structlog and httpx load libraries for consoles and command lines if they find them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Let imports inside the block fail for these packages, as if they were not installed; what is loaded already stays.

    For libraries that have a way to go on without them. Not for use beside other threads that import.
    """
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # the language's way to make `import` not find it
    try:
        yield
    finally:
        for name in hidden:
            if sys.modules.get(name) is None:
                del sys.modules[name]
