"""The bare engine: a process that loads the model as diffusion's host does, and makes pictures with nothing around them.

`python -m bench.diffusion.bare`, with diffusion's settings in its environment: each line of standard input is width, height,
steps and seed; each line of standard output the milliseconds that the engine's call took.
"""

from __future__ import annotations

import os
import sys
import time

from services.diffusion.build import host_environment
from services.diffusion.core.wire import Generate, ImageConfig, Sampling
from services.diffusion.served import Served, read_image
from services.diffusion.settings import DiffusionSettings
from services.kit.settings import load

PROMPT = "a red fox in the snow"


def main() -> int:
    """Serve until standard input ends."""
    if "OMNISERVE_BENCH_BARE" not in os.environ:  # OpenMP reads its variables at the start of a process
        environ = {**os.environ, **host_environment(), "OMNISERVE_BENCH_BARE": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "bench.diffusion.bare"], environ)  # noqa: S606 - itself
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine draws progress bars
    from services.diffusion.host import sd  # noqa: PLC0415 - after that

    served = read_image(load(DiffusionSettings, {k: v for k, v in os.environ.items() if k != "OMNISERVE_BENCH_BARE"}))
    if not isinstance(served, Served) or not isinstance(served.config, ImageConfig):
        raise SystemExit(f"no picture model can be read: {served}")
    model = sd.ImageModel(served.config)
    guidance = served.defaults.guidance
    print("ready", file=answers)
    for line in sys.stdin:
        width, height, steps, seed = map(int, line.split())
        sampling = Sampling(steps, guidance, None, "", "", None, None)
        job = Generate(1, PROMPT, "", width, height, sampling, seed, 1)
        began_s = time.perf_counter()
        model.generate(job, sd.Inputs(), sd.Watcher(lambda *_: None))
        print((time.perf_counter() - began_s) * 1000, file=answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
