"""The mesh under measurement: everything `make run` starts, on free ports, with a state directory of its own."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from bench.llm.sides import Counters, Shape, chat_body, wait_ready
from bench.processes import CHECKOUT, Child, command_line, family, free_ports
from omniserve.admission.v1 import admission_pb2, admission_pb2_grpc
from omniserve.llm.v1 import llm_pb2, llm_pb2_grpc
from services.kit.access import TOKEN_KEY
from services.kit.tokens import ensure_token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CALL_LIMIT_S = 10.0


DOORS: Final = {
    "OMNISERVE_EDGE_PORT": "{}",
    "OMNISERVE_EDGE_OPERATOR_PORT": "{}",
    "OMNISERVE_EDGE_MESH_PORT": "{}",
    "OMNISERVE_EDGE_ADMIN_PORT": "{}",
    "OMNISERVE_ADMISSION_LISTEN": "127.0.0.1:{}",
    "OMNISERVE_ADMISSION_CHECKS_LISTEN": "127.0.0.1:{}",
    "OMNISERVE_VRAM_LISTEN": "127.0.0.1:{}",
    "OMNISERVE_RELAY_LISTEN": "127.0.0.1:{}",
    "OMNISERVE_LLM_LISTEN": "127.0.0.1:{}",
    "OMNISERVE_DIFFUSION_LISTEN": "127.0.0.1:{}",
    "OMNISERVE_JOBS_LISTEN": "127.0.0.1:{}",
    "OMNISERVE_FACADE_LISTEN": "127.0.0.1:{}",
}
"""Every port of a mesh, by the setting that holds it."""


def door_settings(state_dir: Path) -> dict[str, str]:
    """Environment of a mesh on free ports that keeps to this directory."""
    ports = free_ports(len(DOORS))
    doors = {name: form.format(port) for (name, form), port in zip(DOORS.items(), ports, strict=True)}
    return {"OMNISERVE_STATE_DIR": str(state_dir), **doors}


def settings(shape: Shape, doors: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of a mesh of this shape with these doors (`door_settings`).

    Settings of ours that `environ` brings along win over the shape, so that a run can vary one.
    """
    own = {
        "OMNISERVE_LLM_GGUF": str(shape.gguf),
        "OMNISERVE_LLM_THREADS": str(shape.threads),
        "OMNISERVE_LLM_CONTEXTS": str(shape.slots),
        "OMNISERVE_LLM_CTX": str(shape.context_tokens),
        "OMNISERVE_ADMISSION_SLOTS": str(shape.slots),
    }
    return own | dict(environ) | dict(doors)


def part_name(command: Sequence[str]) -> str:
    """Which part of the mesh a command line belongs to."""
    words = [Path(word).name for word in command]
    title = command[0] if command else ""
    if title.startswith("omniserve-"):
        return title.removeprefix("omniserve-").split()[0]
    if "-m" in command[:3]:
        return command[command.index("-m") + 1].removeprefix("services.")
    if "envoy" in words:
        return "envoy"
    return "supervisor" if any("supervisord" in word for word in words) else "other"


class Mesh:
    """A running mesh."""

    name = "mesh"

    def __init__(self, child: Child, variables: Mapping[str, str], channels: contextlib.ExitStack) -> None:
        self.port = int(variables["OMNISERVE_EDGE_PORT"])
        self.pid = child.pid
        self._metadata = ((TOKEN_KEY, ensure_token(Path(variables["OMNISERVE_STATE_DIR"]), "cli")),)
        llm = channels.enter_context(grpc.insecure_channel(variables["OMNISERVE_LLM_LISTEN"]))
        admission = channels.enter_context(grpc.insecure_channel(variables["OMNISERVE_ADMISSION_LISTEN"]))
        self._llm = llm_pb2_grpc.LlmServiceStub(llm)
        self._admission = admission_pb2_grpc.AdmissionServiceStub(admission)

    def body(self, prompt: str, tokens: int) -> str:
        """As Side says."""
        return chat_body(prompt, tokens)

    def processes(self) -> Mapping[str, Sequence[int]]:
        """As Side says."""
        parts: dict[str, list[int]] = {}
        for pid in family(self.pid):
            parts.setdefault(part_name(command_line(pid)), []).append(pid)
        return parts

    def counters(self) -> Counters:
        """As Side says."""
        engine = self.engine()
        return Counters(steps=engine.steps_total, decode_ms=float(engine.decode_ms_total))

    def engine(self) -> llm_pb2.EngineStatus:
        """State of the model that generates text, from the llm service itself."""
        answer = self._llm.GetStatus(llm_pb2.GetStatusRequest(), metadata=self._metadata, timeout=CALL_LIMIT_S)
        return answer.engines[0]

    def pools(self) -> Sequence[admission_pb2.PoolStatus]:
        """State of every pool, from admission itself."""
        request = admission_pb2.GetStatusRequest()
        return self._admission.GetStatus(request, metadata=self._metadata, timeout=CALL_LIMIT_S).pools


@contextlib.contextmanager
def start_mesh(shape: Shape, *, environ: Mapping[str, str] = os.environ, folder: Path) -> Iterator[Mesh]:
    """Run a mesh with its state in `folder` until the block ends."""
    variables = settings(shape, door_settings(folder / "mesh"), environ)
    command = [sys.executable, "-m", "deploy.run"]
    with (
        Child(command, environ=variables, log=folder / "mesh.log", cwd=CHECKOUT) as child,
        contextlib.ExitStack() as channels,
    ):
        wait_ready(f"http://127.0.0.1:{variables['OMNISERVE_EDGE_PORT']}/readyz", child.check)
        yield Mesh(child, variables, channels)
