"""Imports of what is used only: less of a library, or a library later.

structlog and httpx load libraries for consoles and command lines if they find them, packages of bindings bring a higher interface
that a host never uses, and most processes never use what a few functions need.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


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


def inner(name: str) -> ModuleType:
    """Import a module of a package, and of the package no more than that module needs. Raises ModuleNotFoundError.

    What the package itself would load is left out, unless it is loaded already; it can still be imported afterwards.
    """
    package = name.partition(".")[0]
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return importlib.import_module(name)
    bare = sys.modules[package] = ModuleType(package)
    bare.__path__ = spec.submodule_search_locations
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[package]


class Later(ModuleType):
    """A module that is imported when something in it is first asked for, without the packages `hidden`."""

    def __init__(self, name: str, *hidden: str) -> None:
        super().__init__(name)
        self._hidden = hidden

    def __getattr__(self, name: str) -> object:
        with without(*self._hidden):
            module = importlib.import_module(self.__name__)
        found: object = getattr(module, name)
        setattr(self, name, found)
        return found
