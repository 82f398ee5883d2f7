"""A server's pictures for a list of prompts, on disk: what a later run compares with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from bench.parity.gates import Times
from bench.pictures import PictureError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.pictures import Answer, Server

_FILE = "capture.json"


@dataclass(frozen=True, slots=True)
class Captured:
    """Pictures in the order of the prompts, how long each took, and what is wrong with the answers."""

    server: str
    bodies: tuple[Mapping[str, Any], ...]
    pictures: tuple[Image.Image, ...]
    times: Times
    faults: tuple[str, ...]


def bodies_of(prompts: Sequence[str], shared: Mapping[str, Any], seed: int) -> tuple[dict[str, Any], ...]:
    """Return the request of each prompt: lossless, each with a seed of its own, so that two servers draw the same."""
    return tuple(
        {"prompt": prompt, "output_format": "png", **shared, "seed": seed + place}
        for place, prompt in enumerate(prompts)
    )


def captured_of(server: str, bodies: Sequence[Mapping[str, Any]], answers: Sequence[Answer]) -> Captured:
    """Put answers together."""
    inside = tuple(each.inference_s for each in answers if each.inference_s is not None)
    faults = [f"{server}, picture {place}: {fault}" for place, each in enumerate(answers) for fault in each.faults]
    return Captured(
        server=server,
        bodies=tuple(bodies),
        pictures=tuple(each.picture for each in answers),
        times=Times(tuple(each.wall_s for each in answers), inside if len(inside) == len(answers) else None),
        faults=tuple(faults),
    )


def capture(server: Server, bodies: Sequence[Mapping[str, Any]]) -> Captured:
    """Draw everything once, after one picture that is not counted, which loads the model. Raises PictureError."""
    server.draw(bodies[0])
    return captured_of(server.url, bodies, [server.draw(body) for body in bodies])


def save(found: Captured, folder: Path) -> None:
    """Write the pictures as PNG and the rest as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, picture in enumerate(found.pictures):
        picture.save(folder / f"{place}.png")
    told = {
        "server": found.server,
        "bodies": found.bodies,
        "wall_s": found.times.wall,
        "inference_s": found.times.inside,
        "faults": found.faults,
    }
    (folder / _FILE).write_text(json.dumps(told, indent=1) + "\n")


def load(folder: Path) -> Captured:
    """Read what `save` wrote. Raises PictureError when it is not all there."""
    try:
        told = json.loads((folder / _FILE).read_text())
        pictures = [Image.open(folder / f"{place}.png").copy() for place in range(len(told["bodies"]))]
        times = Times(tuple(told["wall_s"]), told["inference_s"] and tuple(told["inference_s"]))
        return Captured(told["server"], tuple(told["bodies"]), tuple(pictures), times, tuple(told["faults"]))
    except (OSError, ValueError, KeyError) as error:
        raise PictureError(f"{folder} holds no captured reference: {error}") from None
