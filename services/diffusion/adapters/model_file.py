"""Model files on disk: their headers, read before anything is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path

from services.diffusion.core.header import Header, HeaderError, read_header


class ModelFileError(Exception):
    """The file cannot be used; the message names it, without its folder."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file that was looked at. `made_unix_s`: when it was last changed."""

    path: Path
    size: int
    made_unix_s: int
    header: Header


def read(path: Path) -> ModelFile:
    """Return a file with its header. Raises ModelFileError."""
    try:
        found = path.expanduser().resolve(strict=True)
        with found.open("rb") as file:
            stat = os.fstat(file.fileno())
            header = read_header(file, stat.st_size)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelFileError(f"{path.name}: {_why(error)}") from error
    except HeaderError as error:
        raise ModelFileError(f"{path.name}: {error}") from error
    return ModelFile(found, stat.st_size, int(stat.st_mtime), header)


def _why(error: Exception) -> str:
    """Return what went wrong without the path, which is nobody's business but the operator's."""
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "it cannot be read"
