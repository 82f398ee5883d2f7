"""What diffusion adds to the bare engine, what exact repeats cost, and how soon a cancelled request frees the device.

Every figure is compared with the bare engine, or with a full run, of the same rounds; sides take turns, and who goes first alternates. Without
OMNISERVE_SD_* in the environment the model is one of random weights. Exit status 1 when a picture is not what it should be.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bench.diffusion.sides import Bare, Mesh, start_mesh
from bench.measure import Spread, ratio, spread, there_and_back
from bench.processes import stop_children_on_signal
from omniserve.diffusion.v1 import diffusion_pb2 as pb
from services.diffusion.native.build import build
from tests.fixtures.image_models import make

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STEPS_OF_REPLAY = 20


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--small-rounds", type=int, default=20, help="rounds at 64x64")
    parser.add_argument(
        "--large-rounds",
        type=int,
        default=4,
        help="rounds at 512x512, of the bare engine and REST alone: they take long",
    )
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    parser.add_argument("--repeats", type=int, default=30, help="exact repeats, each way")
    parser.add_argument("--replays", type=int, default=5, help="replays of the last step")
    parser.add_argument("--cancels", type=int, default=5, help="cancelled requests")
    parser.add_argument("--images", type=int, default=0, help="pictures in a row whose memory is watched")
    parser.add_argument("--loads", type=int, default=0, help="cycles of load and unload whose memory is watched")
    return parser.parse_args(argv)


def overhead(bare: Bare, mesh: Mesh, edge_px: int, *, rounds: int, steps: int, ways: Sequence[str] = ()) -> None:
    """Print what each way to a picture takes beside the bare engine. `ways`: those to try; all when empty."""
    seeds = iter(range(edge_px * 1000, 2**31))
    sides: dict[str, Callable[[int], tuple[float, float]]] = {
        "bare engine": lambda seed: _bare(bare.draw(edge_px, steps, seed)),
        "gRPC, samples": lambda seed: _over_grpc(mesh, mesh.request(edge_px, steps, seed, "raw")),
        "gRPC, WebP": lambda seed: _over_grpc(mesh, mesh.request(edge_px, steps, seed)),
        "REST, WebP": lambda seed: _over_rest(mesh, edge_px, steps, seed),
    }
    names = ["bare engine", *(name for name in list(sides)[1:] if not ways or name in ways)]
    spent = {name: list[float]() for name in names}
    outside = {name: list[float]() for name in names}
    if not ways:
        for name in names:
            sides[name](next(seeds))  # the first of a size allocates
    for place in range(rounds):
        seed = next(seeds)
        for side in there_and_back(place, len(names)):
            wall_ms, engine_ms = sides[names[side]](seed)
            spent[names[side]].append(wall_ms)
            outside[names[side]].append(wall_ms - engine_ms)
    base = spent["bare engine"]
    print(
        f"\n{edge_px}x{edge_px}, {steps} steps, {rounds} rounds: ms, ratio to the bare engine, and ms outside the engine"
    )
    for name, samples in spent.items():
        part = statistics.median(outside[name]) / statistics.median(base)
        print(
            f"  {name:14} {spread(samples).show(1):26} x {ratio(samples, base).show(3):20} "
            f"+ {spread(outside[name]).show(1):18} {part:.2%}",
            flush=True,
        )


def _bare(wall_ms: float) -> tuple[float, float]:
    return wall_ms, wall_ms


def _over_grpc(mesh: Mesh, request: pb.GenerateImageRequest) -> tuple[float, float]:
    wall_ms, image = mesh.grpc(request)
    return wall_ms, float(image.inference_ms)


def _over_rest(mesh: Mesh, edge_px: int, steps: int, seed: int) -> tuple[float, float]:
    wall_ms, told = mesh.rest(edge_px, steps, seed)
    return wall_ms, float(told["data"][0]["omniserve"]["inference_time_ms"])


def repeats(mesh: Mesh, edges: Sequence[int], *, count: int, steps: int) -> None:
    """Print what a picture costs that is there already. Raises RuntimeError when it is not the same or not found."""
    print(f"\nexact repeats, {count} each: ms, and their part of the run that made the picture")
    for edge_px in edges:
        first_ms, made = mesh.grpc(mesh.request(edge_px, steps, 11, teleport=pb.Teleport()))
        hits = []
        for _ in range(count):
            spent_ms, image = mesh.grpc(mesh.request(edge_px, steps, 11, teleport=pb.Teleport()))
            if image.replay != pb.REPLAY_LAYER_RESULT or image.image.data != made.image.data:
                raise RuntimeError("a repeat was not served from the cache of finished pictures")
            hits.append(spent_ms)
        rest = []
        for _ in range(count):
            spent_ms, told = mesh.rest(edge_px, steps, 11, teleport=True)
            if told["data"][0]["omniserve"].get("cache") != "exact_prompt_result_cache":
                raise RuntimeError("a repeat over REST was not served from the cache of finished pictures")
            rest.append(spent_ms)
        for name, samples in (("gRPC", hits), ("REST", rest)):
            print(f"  {edge_px:4} {name}  {spread(samples).show(1):24} x {statistics.median(samples) / first_ms:.4f}")


def replays(mesh: Mesh, edge_px: int, *, count: int) -> None:
    """Print how much sooner a run is done that resumes at its last step. Raises RuntimeError when it computes more."""
    last = pb.Teleport(start_step=STEPS_OF_REPLAY - 1)
    full, replayed = [], []
    for place in range(count):
        full_ms, made = mesh.grpc(mesh.request(edge_px, STEPS_OF_REPLAY, place, "raw", teleport=last))
        # Another encoding with the same samples, which the cache of finished pictures does not have.
        request = mesh.request(edge_px, STEPS_OF_REPLAY, place, "raw", teleport=last, embed=False)
        spent_ms, again = mesh.grpc(request)
        if again.denoise_calls != 1 or again.image.data != made.image.data:
            raise RuntimeError(f"a replay made {again.denoise_calls} denoise calls, or other pixels")
        full.append(full_ms)
        replayed.append(spent_ms)
    sooner = ratio(full, replayed).show(2)
    print(f"  {edge_px:4} full {spread(full).show(0):22} replay {spread(replayed).show(0):20} {sooner} times sooner")


def cancels(mesh: Mesh, edge_px: int, *, count: int) -> None:
    """Print how long after a caller left the device is free, beside the time of a step."""
    step_ms, free_ms = [], []
    for place in range(count):
        call = mesh.stub.GenerateImage(mesh.request(edge_px, 150, place), metadata=mesh.metadata)
        marks = []
        for event in call:
            if event.HasField("step") and event.step.phase == pb.PHASE_DENOISING and event.step.step > 0:
                marks.append((event.step.step, time.perf_counter()))
                if len(marks) > 3:
                    break
        (first, began_s), (last, ended_s) = marks[0], marks[-1]
        step_ms.append((ended_s - began_s) * 1000 / (last - first))
        time.sleep(step_ms[-1] / 2000 * (place % 2))
        before = mesh.engine()
        if before.active_requests != 1:
            raise RuntimeError("the request to be cancelled was not at work")
        began_s = time.perf_counter()
        call.cancel()
        # It is not free before the step has ended, and who asks all the time takes the engine's cores.
        time.sleep(step_ms[-1] / 1000)
        while (after := mesh.engine()).active_requests:
            time.sleep(0.003)
        free_ms.append((time.perf_counter() - began_s) * 1000)
        if (after.host_pid, after.cancelled_total) != (before.host_pid, before.cancelled_total + 1):
            raise RuntimeError("the engine was ended instead of the request")
    beyond: Spread = spread([free - step for free, step in zip(free_ms, step_ms, strict=True)])
    print(
        f"  {edge_px:4} a step {spread(step_ms).show(1):24} free {spread(free_ms).show(1):24} beyond a step {beyond.show(1)}"
    )


def memory(mesh: Mesh, *, images: int, loads: int) -> None:
    """Print the resident memory of service and host along a row of pictures and of loads."""
    if images:
        print(f"\nmemory along {images} pictures of 64x64, MiB: service, host")
        for place in range(images + 1):
            mesh.grpc(mesh.request(64, 2, place))
            if place % max(1, images // 10) == 0:
                print(f"  {place:5} {_mib(_service(mesh)):8.1f} {_mib(mesh.engine().host_pid):8.1f}", flush=True)
    if loads:
        print(f"\nmemory along {loads} loads and unloads, MiB: service, host when loaded")
        service = _service(mesh)
        for place in range(loads + 1):
            mesh.grpc(mesh.request(64, 2, place))
            host_mib = _mib(mesh.engine().host_pid)
            mesh.admin.UnloadModel(pb.UnloadModelRequest(), metadata=mesh.metadata, timeout=120)
            if place % max(1, loads // 5) == 0:
                print(f"  {place:5} {_mib(service):8.1f} {host_mib:8.1f}", flush=True)


def _service(mesh: Mesh) -> int:
    parent = psutil.Process(mesh.engine().host_pid).parent()
    assert parent is not None
    return parent.pid


def _mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = arguments(argv)
    stop_children_on_signal()
    with tempfile.TemporaryDirectory(prefix="omniserve-bench-") as name:
        folder = Path(name)
        own = {key for key in os.environ if key.startswith("OMNISERVE_SD_")}
        model = {} if own else make(folder / "model").settings | {"OMNISERVE_DIFFUSION_NATIVE_TAP": str(build())}
        print(f"model: {'as set in the environment' if own else 'random weights'}; one request at a time", flush=True)
        with start_mesh(folder, model) as mesh, Bare({**os.environ, **model}) as bare:
            if options.small_rounds:
                overhead(bare, mesh, 64, rounds=options.small_rounds, steps=options.steps)
            if options.large_rounds:
                overhead(bare, mesh, 512, rounds=options.large_rounds, steps=options.steps, ways=("REST, WebP",))
            if options.repeats:
                repeats(mesh, (64, 512) if options.large_rounds else (64,), count=options.repeats, steps=options.steps)
            if options.replays:
                print(f"\nreplays of the last of {STEPS_OF_REPLAY} steps, ms")
                replays(mesh, 64, count=options.replays)
                replays(mesh, 128, count=max(1, options.replays // 2))
            if options.cancels:
                print("\nfrom the caller's leaving to a free device, ms")
                cancels(mesh, 128, count=options.cancels)
            memory(mesh, images=options.images, loads=options.loads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
