"""llama.cpp's C API as its Python package declares it, without the rest of that package, which takes longer to load than all else."""

from typing import TYPE_CHECKING

from services.kit.lean import inner

if TYPE_CHECKING:
    import llama_cpp.llama_cpp as api
else:
    api = inner("llama_cpp.llama_cpp")

__all__ = ["api"]
