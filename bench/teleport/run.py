"""Whether exact replay is exact: without it, priming it and replaying must give the same pixels, for each sampler.

The prime must be a miss and the replay a hit; how much sooner it comes is told beside. Exit status 1 when anything is
not so, 2 when the server gave no picture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.measure import ratio
from bench.parity.run import PROMPTS
from bench.pictures import PictureError, Server
from bench.processes import CHECKOUT
from bench.teleport.rounds import Shot, Trial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.pictures import Answer

SAMPLERS: Final = (
    "euler",
    "euler_a",
    "heun",
    "dpm2",
    "dpm++2s_a",
    "dpm++2m",
    "dpm++2mv2",
    "ipndm",
    "ipndm_v",
    "lcm",
    "ddim_trailing",
    "tcd",
    "res_multistep",
    "res_2s",
    "er_sde",
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base", default="http://127.0.0.1:8791", help="address of the front door")
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), help="samplers to try")
    parser.add_argument("--limit", type=int, default=1, help="prompts for each sampler")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps")
    parser.add_argument("--start-step", type=int, help="step from which a replay resumes; absent: the last")
    parser.add_argument("--size", default="auto", help="WIDTHxHEIGHT, or auto for the model's own")
    parser.add_argument(
        "--seed-offset", type=int, default=0, help="another one for each run against a cache that is kept"
    )
    parser.add_argument("--out", type=Path, default=CHECKOUT / "build" / "bench" / "teleport.json", help="result file")
    return parser.parse_args(argv)


def shot(answer: Answer) -> Shot:
    """Return what a trial needs to know of a picture."""
    spent_s = answer.wall_s if answer.inference_s is None else answer.inference_s
    picture = answer.picture.convert("RGB")
    digest = hashlib.sha256(b"%dx%d " % picture.size + picture.tobytes()).hexdigest()
    return Shot(digest, answer.cache, spent_s, answer.wall_s, answer.ours.get("denoise_calls"))


def trial(server: Server, name: str, body: Mapping[str, Any], start_step: int) -> Trial:
    """Draw one prompt in the four ways. Raises PictureError."""
    teleport = {"teleport": {"start_step": start_step}}
    return Trial(
        name,
        baseline=shot(server.draw(body)),
        prime=shot(server.draw({**body, **teleport})),
        replay=shot(server.draw({**body, **teleport})),
        # As lossless as PNG is for what is compared, but another file.
        other=shot(server.draw({**body, **teleport, "embed_parameters": False})),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Try every sampler and print."""
    options = arguments(argv)
    start_step = options.steps - 1 if options.start_step is None else options.start_step
    server = Server(options.base, api_key=os.environ.get("OMNISERVE_API_KEY", ""))
    shared = {"output_format": "png", "size": options.size, "steps": options.steps}
    trials = []
    print(f"steps {options.steps}, resumed at {start_step}, size {options.size}, one request at a time\n")
    print("baseline s  prime  replay  by                         other  by                          sampler, prompt")
    try:
        server.draw({**shared, "prompt": PROMPTS[0], "seed": 0})  # loads the model
        for sampler in options.samplers:
            for place, prompt in enumerate(PROMPTS[: options.limit]):
                body = {**shared, "prompt": prompt, "sampler": sampler, "seed": 1000 + options.seed_offset + place}
                trials.append(trial(server, f"{sampler}, {prompt[:40]}", body, start_step))
                _show(trials[-1])
    except PictureError as error:
        print(f"no result: {error}", file=sys.stderr)
        return 2
    finally:
        server.close()
    return report(trials, options.out)


def _show(done: Trial) -> None:
    print(
        f"{done.baseline.spent_s:10.3f}  {done.prime.spent_s:5.3f}  {done.replay.spent_s:6.3f}"
        f"  {done.replay.cache or 'computed':26} {done.other.spent_s:5.3f}  {done.other.cache or 'computed':26}  {done.name}",
        flush=True,
    )


def report(trials: Sequence[Trial], out: Path) -> int:
    """Print and write what was found; return the exit status."""
    faults = [fault for each in trials for fault in each.faults()]
    for kind in ("replay", "other"):
        sooner = ratio([each.baseline.wall_s for each in trials], [getattr(each, kind).wall_s for each in trials])
        print(f"\n{kind}: {sooner.show(1)} times sooner than without teleport, by the clock on the wall", end="")
    print(f"\n{len(trials)} trials, {sum(not each.faults() for each in trials)} exact")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"trials": [asdict(each) for each in trials], "faults": faults}, indent=1) + "\n")
    for fault in faults:
        print(f"NOT EXACT: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
