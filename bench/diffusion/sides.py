"""The ways to one picture that are compared: the bare engine, diffusion over gRPC, and the whole mesh over REST."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
import httpx

from bench.diffusion.bare import PROMPT
from bench.llm.mesh import door_settings
from bench.llm.sides import wait_ready
from bench.processes import CHECKOUT, Child
from omniserve.diffusion.v1 import diffusion_pb2 as pb
from omniserve.diffusion.v1 import diffusion_pb2_grpc
from omniserve.media.v1 import media_pb2
from services.kit.access import TOKEN_KEY
from services.kit.tokens import ensure_token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LIMIT_S: Final = 900.0
FORMATS: Final = {"webp": media_pb2.IMAGE_FORMAT_WEBP, "raw": media_pb2.IMAGE_FORMAT_RAW}


class Bare:
    """The engine alone, in a process of its own."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.diffusion.bare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environ),
            cwd=CHECKOUT,
            text=True,
        )
        self._ask("")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise RuntimeError("the bare engine ended")
        return answer

    def draw(self, edge_px: int, steps: int, seed: int) -> float:
        """Return the milliseconds that a picture took."""
        return float(self._ask(f"{edge_px} {edge_px} {steps} {seed}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


class Mesh:
    """A running mesh, as its callers and its operator see it."""

    def __init__(self, variables: Mapping[str, str], channel: grpc.Channel, client: httpx.Client) -> None:
        token = ensure_token(Path(variables["OMNISERVE_STATE_DIR"]), "facade")
        self.metadata = ((TOKEN_KEY, token),)
        self.stub: Any = diffusion_pb2_grpc.DiffusionServiceStub(channel)
        self.admin: Any = diffusion_pb2_grpc.DiffusionAdminServiceStub(channel)
        self._client = client

    def request(
        self,
        edge_px: int,
        steps: int,
        seed: int,
        written: str = "webp",
        *,
        embed: bool | None = None,
        teleport: pb.Teleport | None = None,
    ) -> pb.GenerateImageRequest:
        """Return the request for a picture. `written`: webp or raw."""
        encoding = media_pb2.ImageEncoding(format=FORMATS[written], embed_parameters=embed)
        options = pb.ImageOptions(
            width_px=edge_px, height_px=edge_px, steps=steps, seed=seed, encoding=encoding, teleport=teleport
        )
        return pb.GenerateImageRequest(prompt=PROMPT, options=options)

    def grpc(self, request: pb.GenerateImageRequest) -> tuple[float, pb.Image]:
        """Return the milliseconds that a picture took, and the picture."""
        began_s = time.perf_counter()
        events = list(self.stub.GenerateImage(request, metadata=self.metadata, timeout=LIMIT_S))
        spent_ms = (time.perf_counter() - began_s) * 1000
        return spent_ms, next(event.image for event in events if event.HasField("image"))

    def rest(self, edge_px: int, steps: int, seed: int, **more: object) -> tuple[float, Mapping[str, Any]]:
        """Return the milliseconds that a picture took through the front door, and the answer."""
        body = {"prompt": PROMPT, "size": f"{edge_px}x{edge_px}", "steps": steps, "seed": seed, **more}
        began_s = time.perf_counter()
        response = self._client.post("/v1/images/generations", json=body)
        told: Mapping[str, Any] = response.raise_for_status().json()
        return (time.perf_counter() - began_s) * 1000, told

    def engine(self) -> pb.EngineStatus:
        """Return the state of the picture model's engine."""
        status: pb.GetStatusResponse = self.stub.GetStatus(pb.GetStatusRequest(), metadata=self.metadata, timeout=60)
        return status.engines[0]


@contextlib.contextmanager
def start_mesh(folder: Path, model: Mapping[str, str]) -> Iterator[Mesh]:
    """Run a mesh that serves a picture model until the block ends."""
    variables = {**os.environ, "OMNISERVE_EMBEDDING_GGUF": "none", **model, **door_settings(folder / "mesh")}
    command = [sys.executable, "-m", "deploy.run"]
    url = f"http://127.0.0.1:{variables['OMNISERVE_EDGE_PORT']}"
    unlimited = [("grpc.max_receive_message_length", -1)]
    with (
        Child(command, environ=variables, log=folder / "mesh.log", cwd=CHECKOUT) as child,
        grpc.insecure_channel(variables["OMNISERVE_DIFFUSION_LISTEN"], options=unlimited) as channel,
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
    ):
        wait_ready(f"{url}/readyz", child.check)
        yield Mesh(variables, channel, client)
