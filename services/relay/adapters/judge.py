"""Envoy's own judgement of a configuration, before it goes live."""

import asyncio
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.kit.yaml_text import to_text
from services.relay.core.render_nodes import Tree

_LIMIT_S: Final = 120.0
_LONGEST: Final = 2000
_VERSION: Final = re.compile(r"/(\d+\.\d+\.\d+[^/]*)/")


class JudgeError(Exception):
    """Envoy could not be asked; the message says why."""


async def refusal_of(envoy: str, configuration: Tree) -> str | None:
    """Return why Envoy refuses the configuration, None when it takes it. Opens no port. Raises JudgeError."""
    text = await asyncio.to_thread(to_text, configuration)
    with tempfile.TemporaryDirectory(prefix="omniserve-relay-") as folder:
        path = Path(folder) / "whole.yaml"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        status, said = await _run([envoy, "--mode", "validate", "-c", str(path), "--log-level", "error"])
    if status == 0:
        return None
    return _reason(said) or f"envoy --mode validate ended with status {status}"


class EnvoyVersion:
    """The version of the Envoy that judges, found out when it is first asked for: starting an Envoy costs."""

    def __init__(self, envoy: str) -> None:
        self._envoy = envoy
        self._turn = asyncio.Lock()
        self._found: str | None = None

    async def read(self) -> str:
        """Return the version, "" when Envoy does not say one or cannot be asked."""
        async with self._turn:
            if self._found is None:
                try:
                    _, said = await _run([self._envoy, "--version"])
                except JudgeError:
                    return ""
                found = _VERSION.search(said.rpartition("version:")[2])
                self._found = found[1] if found else ""
            return self._found


async def _run(command: Sequence[str]) -> tuple[int, str]:
    try:  # Python spawns by vfork; the event loop forks, and a child of a process that speaks gRPC may crash in between
        process = subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise JudgeError(f"cannot run {command[0]} (OMNISERVE_EDGE_ENVOY): {error.strerror or error}") from error
    try:
        said, _ = await asyncio.to_thread(process.communicate, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise JudgeError(f"{command[0]} did not answer within {_LIMIT_S:g} s") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, said.decode(errors="replace")


def _reason(said: str) -> str:
    """Return what Envoy objects to, without its log's heads and without the configuration, which may hold credentials."""
    lines = [line.rpartition("] ")[2] if line.startswith("[") else line for line in said.splitlines()]
    text = " ".join(line.strip() for line in lines if line.strip())
    if "{" in text:
        text = text.rpartition("}")[2].strip(" :") or "Envoy does not say why"
    return text[:_LONGEST]
