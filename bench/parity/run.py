"""Whether one image server may replace another: the same prompts and seeds at both, pictures and times compared.

Exit status 1 when a gate is missed, 2 when a server gave no picture.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.parity.capture import Captured, bodies_of, capture, load, save
from bench.parity.gates import Gates, Prices, Verdict, judge, judge_speed, speed_of
from bench.parity.likeness import Pixels, compare, entropy
from bench.parity.sheet import contact_sheet
from bench.pictures import PictureError, Server
from bench.processes import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import Image

PROMPTS: Final = (
    "a red fox in the snow, morning light",
    "a bowl of oranges on a wooden table, still life",
    "a lighthouse on a cliff above a stormy sea",
    "a narrow street in an old town at night, lanterns",
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--reference", help="address of the server to be replaced")
    parser.add_argument("--candidate", help="address of the server to replace it")
    parser.add_argument(
        "--capture-reference", action="store_true", help="only draw the reference's pictures into --out"
    )
    parser.add_argument("--reference-run", type=Path, help="pictures captured before, instead of --reference")
    parser.add_argument(
        "--out", type=Path, default=CHECKOUT / "build" / "bench" / "parity", help="where all is written"
    )
    parser.add_argument("--prompts", type=Path, help="file with a prompt a line; absent: a few of the bench's own")
    parser.add_argument("--size", default="512x512", help="WIDTHxHEIGHT")
    parser.add_argument("--steps", type=int, help="denoising steps; absent: each server's own")
    parser.add_argument("--guidance", type=float, help="guidance; absent: each server's own")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first prompt")
    parser.add_argument("--reference-usd-hr", type=float, default=1.0, help="price of the reference's device")
    parser.add_argument("--candidate-usd-hr", type=float, default=1.0, help="price of the candidate's device")
    parser.add_argument("--pictures-a-month", type=int, default=100_000, help="for the monthly cost")
    for name, value in asdict(Gates()).items():
        parser.add_argument(f"--gate-{name.replace('_', '-')}", type=float, default=value, help="gate")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    options = arguments(argv)
    wanted = (options.reference is not None) + (options.reference_run is not None)
    if wanted != 1 or (options.candidate is None) != options.capture_reference:
        print("give --reference or --reference-run, and --candidate unless --capture-reference", file=sys.stderr)
        return 2
    try:
        reference = _reference(options)
        if options.capture_reference:
            save(reference, options.out)
            print(f"{len(reference.pictures)} pictures of {reference.server} are in {options.out}")
            return 0
        candidate = _drawn(options.candidate, reference.bodies)
    except PictureError as error:
        print(f"no comparison: {error}", file=sys.stderr)
        return 2
    return report(reference, candidate, options)


def _reference(options: argparse.Namespace) -> Captured:
    if options.reference_run is not None:
        return load(options.reference_run)
    given = {"size": options.size, "steps": options.steps, "guidance": options.guidance}
    shared = {name: value for name, value in given.items() if value is not None}
    prompts = PROMPTS
    if options.prompts is not None:
        prompts = tuple(line.strip() for line in options.prompts.read_text().splitlines() if line.strip())
    return _drawn(options.reference, bodies_of(prompts, shared, options.seed))


def _drawn(url: str, bodies: Sequence[Any]) -> Captured:
    server = Server(url, api_key=os.environ.get("OMNISERVE_API_KEY", ""))
    try:
        return capture(server, bodies)
    finally:
        server.close()


def pixels(picture: Image.Image, size: tuple[int, int]) -> Pixels:
    """Return a picture's pixels at a size."""
    shown = picture.convert("RGB")
    return np.asarray(shown if shown.size == size else shown.resize(size), np.float64) / 255


def report(reference: Captured, candidate: Captured, options: argparse.Namespace) -> int:
    """Print and write what was found; return the exit status."""
    gates = Gates(**{name: getattr(options, f"gate_{name}") for name in asdict(Gates())})
    prices = Prices(options.reference_usd_hr, options.candidate_usd_hr, options.pictures_a_month)
    verdict = Verdict([*reference.faults, *candidate.faults])
    rows = []
    print("likeness is by pixels (SSIM, colour histograms): a substitute for CLIP, which knows what a picture shows\n")
    print("structure  colour  entropy (drift)  sharpness  colourfulness  prompt")
    found = []
    for body, one, other in zip(reference.bodies, reference.pictures, candidate.pictures, strict=True):
        first, second = pixels(one, one.size), pixels(other, one.size)
        likeness = compare(first, second)
        judge(body["prompt"], likeness, gates, verdict)
        found.append({"prompt": body["prompt"], **asdict(likeness), "entropy_bits": entropy(second)})
        rows.append((body["prompt"], one, other))
        print(
            f"{likeness.structure:9.3f}  {likeness.colour:6.3f}  {entropy(second):6.2f} ({likeness.entropy_drift:+6.2f})"
            f"  {likeness.sharpness:9.2f}  {likeness.colourfulness:13.2f}  {body['prompt'][:60]}"
        )
    speed = speed_of(reference.times, candidate.times, prices)
    judge_speed(speed, gates, verdict)
    print(
        f"\nlatency, candidate over reference, by {speed.by}: {speed.latency.show(2)}; by wall time {speed.wall.show(2)}"
    )
    print(f"a month of {prices.pictures_a_month} pictures: {speed.cost:.2f} times the reference's cost", end="")
    print(f" ({speed.candidate_usd:.0f} against {speed.reference_usd:.0f} USD)")
    options.out.mkdir(parents=True, exist_ok=True)
    save(reference, options.out / "reference")
    save(candidate, options.out / "candidate")
    contact_sheet(rows).save(options.out / "sheet.png")
    told = {"pictures": found, "speed": asdict(speed), "cost_ratio": speed.cost, "gates": asdict(gates)}
    (options.out / "parity.json").write_text(json.dumps(told | {"missed": verdict.missed}, indent=1) + "\n")
    print(f"contact sheet: {options.out / 'sheet.png'}")
    for sentence in verdict.missed:
        print(f"MISSED: {sentence}")
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
