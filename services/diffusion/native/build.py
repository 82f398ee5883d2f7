"""Compiles the library: `python -m services.diffusion.native.build`. Without it pictures are made all the same.

What is missing then: runs can only be ended with their process, repeats are served from finished pictures alone, and every
prompt is encoded anew.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent
SOURCES: Final = tuple(_FOLDER / name for name in ("denoise_tap.cpp", "prompt_tap.cpp"))
EXPORTS: Final = _FOLDER / "exports.map"
_READ: Final = (*SOURCES, EXPORTS, _FOLDER / "tap.h")
LIBRARY: Final = Path(__file__).resolve().parents[3] / "build" / "native" / "libdenoise_tap.so"
_FLAGS: Final = (
    "-std=c++17",
    "-O2",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
)


def build(library: Path = LIBRARY) -> Path:
    """Compile when a source is newer than the library, and return where that is. Raises OSError, CalledProcessError."""
    if library.exists() and library.stat().st_mtime >= max(each.stat().st_mtime for each in _READ):
        return library
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise FileNotFoundError(f"there is no C++ compiler {compiler!r}")
    library.parent.mkdir(parents=True, exist_ok=True)
    # Whoever loads it meanwhile sees all of it, or the former one.
    part = library.with_name(f"{library.name}.{os.getpid()}")
    subprocess.run([compiler, *_FLAGS, f"-Wl,--version-script={EXPORTS}", "-o", part, *SOURCES], check=True)
    part.replace(library)
    return library


if __name__ == "__main__":
    try:
        build()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"the denoiser's watch was not built, pictures are made without it: {error}\n")
