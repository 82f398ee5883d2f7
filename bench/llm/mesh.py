"""The mesh under measurement: everything `make run` starts, on free ports, with a state directory of its own."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of one mesh."""

    public: int
    operator: int
    envoy_admin: int
    facade: int
    admission: int
    llm: int


def door_settings(ports: Ports, state_dir: Path) -> dict[str, str]:
    """Environment of a mesh that keeps to these ports and this directory."""
    return {
        "OMNISERVE_STATE_DIR": str(state_dir),
        "OMNISERVE_EDGE_PORT": str(ports.public),
        "OMNISERVE_EDGE_OPERATOR_PORT": str(ports.operator),
        "OMNISERVE_EDGE_ADMIN_PORT": str(ports.envoy_admin),
        "OMNISERVE_FACADE_LISTEN": f"127.0.0.1:{ports.facade}",
        "OMNISERVE_FACADE_ADDRESS": f"127.0.0.1:{ports.facade}",
        "OMNISERVE_ADMISSION_LISTEN": f"127.0.0.1:{ports.admission}",
        "OMNISERVE_ADMISSION_ADDRESS": f"127.0.0.1:{ports.admission}",
        "OMNISERVE_LLM_LISTEN": f"127.0.0.1:{ports.llm}",
        "OMNISERVE_LLM_ADDRESS": f"127.0.0.1:{ports.llm}",
    }


def settings(shape: Shape, ports: Ports, state_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of a mesh of this shape; settings of ours that `environ` brings along win, so that a run can vary one."""
    own = {
        "OMNISERVE_LLM_GGUF": str(shape.gguf),
        "OMNISERVE_LLM_THREADS": str(shape.threads),
        "OMNISERVE_LLM_CONTEXTS": str(shape.slots),
        "OMNISERVE_LLM_CTX": str(shape.context_tokens),
        "OMNISERVE_ADMISSION_SLOTS": str(shape.slots),
    }
    return own | dict(environ) | door_settings(ports, state_dir)


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

    def __init__(self, child: Child, ports: Ports, state_dir: Path, channels: contextlib.ExitStack) -> None:
        self.port = ports.public
        self.pid = child.pid
        self._metadata = ((TOKEN_KEY, ensure_token(state_dir, "cli")),)
        llm = channels.enter_context(grpc.insecure_channel(f"127.0.0.1:{ports.llm}"))
        admission = channels.enter_context(grpc.insecure_channel(f"127.0.0.1:{ports.admission}"))
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
    ports = Ports(*free_ports(len(Ports.__dataclass_fields__)))
    state_dir = folder / "mesh"
    variables = settings(shape, ports, state_dir, environ)
    command = [sys.executable, "-m", "deploy.run"]
    with (
        Child(command, environ=variables, log=folder / "mesh.log", cwd=CHECKOUT) as child,
        contextlib.ExitStack() as channels,
    ):
        wait_ready(f"http://127.0.0.1:{ports.public}/readyz", child.check)
        yield Mesh(child, ports, state_dir, channels)
