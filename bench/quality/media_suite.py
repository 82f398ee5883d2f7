"""Pictures and speech where the server makes them: a container that opens, of what was asked for."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import TYPE_CHECKING

from PIL import Image, UnidentifiedImageError

from bench.quality.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.quality.server import Server


def image_checks() -> Iterator[tuple[str, Callable[[Server], Finding | None]]]:
    """Yield the checks of pictures by name."""
    yield "image_container", image_container


def audio_checks() -> Iterator[tuple[str, Callable[[Server], Finding | None]]]:
    """Yield the checks of speech by name."""
    yield "audio_container", audio_container


def image_container(server: Server) -> Finding | None:
    """Check that a picture opens and has the size that was asked for; None where no engine makes any."""
    body = {"prompt": "a red fox", "size": "256x256", "n": 1, "seed": 1, "response_format": "b64_json"}
    answer = server.bytes_of("/v1/images/generations", body)
    if answer is None:
        return None
    try:
        data = base64.b64decode(json.loads(answer)["data"][0]["b64_json"], validate=True)
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            found = picture.size
    except (ValueError, KeyError, IndexError, TypeError, OSError, UnidentifiedImageError) as error:
        return Finding("image_container", 0.0, f"it does not open: {error}", floor=1.0)
    return Finding("image_container", float(found == (256, 256)), f"{found[0]}x{found[1]}", floor=1.0)


def audio_container(server: Server) -> Finding | None:
    """Check that speech is a WAV file with sound in it; None where no engine makes any."""
    body = {"model": "tts-1", "voice": "alloy", "input": "Good morning.", "response_format": "wav"}
    answer = server.bytes_of("/v1/audio/speech", body)
    if answer is None:
        return None
    try:
        with wave.open(io.BytesIO(answer)) as sound:
            frames, rate = sound.getnframes(), sound.getframerate()
    except (wave.Error, EOFError) as error:
        return Finding("audio_container", 0.0, f"it does not open: {error}", floor=1.0)
    return Finding("audio_container", float(frames > 0 and rate > 0), f"{frames} frames at {rate} Hz", floor=1.0)
