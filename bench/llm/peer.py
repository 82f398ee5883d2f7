"""Build the peer that the mesh is measured against: `llama-server` of the very llama.cpp the engine runs on.

The sources are those inside the sdist of the installed llama-cpp-python, and the CMake switches that matter for speed are
the ones its wheel was built with, so what differs between the two sides is the serving, never the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from bench.processes import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

CACHE = CHECKOUT / "build" / "peer"
DISTRIBUTION = "llama-cpp-python"
VENDORED = PurePosixPath("vendor/llama.cpp")
BUILD_LIMIT_S = 60 * 60

# The wheel's own settings (Release, shared libraries, everything else at ggml's defaults: native instruction set, OpenMP,
# llamafile's kernels), then what keeps the build to the one program and off the network.
SWITCHES: Mapping[str, str] = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "LLAMA_BUILD_COMMON": "ON",
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_UI": "OFF",  # would run npm
    "LLAMA_USE_PREBUILT_UI": "OFF",  # would download
    "LLAMA_OPENSSL": "OFF",
}


class PeerError(Exception):
    """The peer cannot be built here; the message says what to do."""


def installed_version() -> str:
    """Version of the llama-cpp-python that the engine uses."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise PeerError(f"{DISTRIBUTION} is not installed: run `make setup` first") from error


def switches(environ: Mapping[str, str]) -> list[str]:
    """CMake arguments; CMAKE_ARGS is appended, since the wheel's build obeys it too."""
    return [f"-D{name}={value}" for name, value in SWITCHES.items()] + shlex.split(environ.get("CMAKE_ARGS", ""))


def find_tool(name: str, package: str) -> str:
    """Path of a build tool: the virtual environment's first, then the PATH's."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise PeerError(f"{name} is needed to build llama-server: `{sys.executable} -m pip install {package}`")
    return found


def vendored_members(members: Iterable[tarfile.TarInfo]) -> Iterator[tarfile.TarInfo]:
    """Pick the llama.cpp files of the sdist, renamed so that the tree's root is llama.cpp itself."""
    for member in members:
        inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
        if member.isfile() and inside.is_relative_to(VENDORED):
            yield member.replace(name=str(inside.relative_to(VENDORED)), deep=False)


def fetch_sources(version: str, into: Path) -> None:
    """Download the sdist through pip and unpack its llama.cpp into `into`."""
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", DISTRIBUTION]
        _run([*download, "--dest", folder, f"{DISTRIBUTION}=={version}"])
        (sdist,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(into, members=vendored_members(archive), filter="data")
    if not (into / "tools" / "server" / "CMakeLists.txt").exists():
        raise PeerError(f"the sdist of {DISTRIBUTION} {version} carries no llama-server sources")


def recipe(version: str, environ: Mapping[str, str]) -> str:
    """Describe what a built peer was made from, as kept beside it."""
    return json.dumps({"version": version, "switches": switches(environ)}, indent=2)


def build(version: str, *, jobs: int, cache: Path = CACHE, environ: Mapping[str, str] = os.environ) -> Path:
    """Path of a llama-server for `version`, built if the cache has none made with the same switches."""
    root = cache / version
    server, stamp = root / "build" / "bin" / "llama-server", root / "built.json"
    wanted = recipe(version, environ)
    if server.exists() and stamp.exists() and stamp.read_text() == wanted:
        return server
    cmake, ninja = find_tool("cmake", "cmake"), find_tool("ninja", "ninja")
    source = root / "llama.cpp"
    stamp.unlink(missing_ok=True)
    if not (source / "CMakeLists.txt").exists():
        fetch_sources(version, source)
    # Names for the build's self-description; without them it would ask git about whatever repository lies around it.
    described = ["-DLLAMA_BUILD_NUMBER=0", f"-DLLAMA_BUILD_COMMIT={version}"]
    configure = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", str(source), "-B", str(root / "build")]
    _run(configure + described + switches(environ))
    _run(["nice", cmake, "--build", str(root / "build"), "--target", "llama-server", "--parallel", str(jobs)])
    _run([str(server), "--version"])
    stamp.write_text(wanted)
    return server


def _run(command: Sequence[str]) -> None:
    """Run one build step; its output goes to stderr, since stdout carries the path."""
    try:
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=BUILD_LIMIT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"building llama-server failed: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the path of the peer's program, building it first where needed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel compiler processes")
    options = parser.parse_args(arguments)
    try:
        print(build(installed_version(), jobs=options.jobs))
    except PeerError as error:
        print(f"bench.llm.peer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
