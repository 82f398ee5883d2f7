"""What a stream of pictures says, read from its server-sent events. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from cli.errors import CliError
from cli.http import describe_error
from cli.sse import SseComment, SseEvent
from cli.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

_STEP = re.compile(r"(denoising|decoding|upscaling|encoding) (\d+)/(\d+)")
_WAITING = re.compile(r"(queued|loading|preparing)\b ?(.*)")


@dataclass(frozen=True)
class Waiting:
    """The picture has not been begun; `what` says why, in a few words."""

    what: str


@dataclass(frozen=True)
class Step:
    """What the engine does, and how far it is."""

    phase: str
    done: int
    of: int


@dataclass(frozen=True)
class Preview:
    """How a picture looks so far; `size` as WIDTHxHEIGHT, `length` in bytes."""

    number: int
    size: str
    length: int


@dataclass(frozen=True)
class Picture:
    """A finished picture. `seed` and `took_ms` are None where the server does not tell; `cache` is "" for one that was computed."""

    data: bytes
    size: str
    seed: int | None
    took_ms: int | None
    cache: str


PictureEvent: TypeAlias = Waiting | Step | Preview | Picture


@dataclass
class PictureReader:
    """Reads one answer. Feed it every item of the stream, then `finish` it: only then is the answer known to be whole."""

    pictures: int
    found: int = 0

    def read(self, item: SseEvent | SseComment) -> PictureEvent | None:
        """Return what the item tells, None for nothing. Raises CliError for an error event and for data that is no event."""
        if isinstance(item, SseComment):
            return _progress(item.text)
        told = _object(item.data)
        error = told.get("error")
        if isinstance(error, dict) or item.event == "error":
            raise CliError(describe_error(error if isinstance(error, dict) else told))
        kind = str(told.get("type") or item.event)
        if kind.endswith(".partial_image"):
            number = told.get("partial_image_index")
            return Preview(number + 1 if isinstance(number, int) else 1, _size(told), len(_data(told)))
        if not kind.endswith(".completed"):
            return None
        self.found += 1
        ours = told.get("omniserve")
        ours = ours if isinstance(ours, dict) else {}
        return Picture(
            _data(told), _size(told), _number(ours, "seed"), _number(ours, "inference_time_ms"), _cache(ours)
        )

    def finish(self) -> None:
        """Raise CliError when the stream ended before its last picture: the answer was cut short."""
        if self.found < self.pictures:
            raise CliError(
                f"the answer was cut short: {self.found} of {self.pictures} pictures came before the stream ended "
                "[stream_broken]"
            )


def _progress(text: str) -> PictureEvent | None:
    step = _STEP.fullmatch(text)
    if step is not None:
        return Step(step[1], int(step[2]), int(step[3]))
    waiting = _WAITING.fullmatch(text)
    if waiting is None:
        return None
    if waiting[1] == "queued":
        return Waiting(f"queued, place {one_line(waiting[2], limit=12)}")
    return Waiting("loading the model" if waiting[1] == "loading" else "reading the prompt")


def _object(data: str) -> dict[str, Any]:
    try:
        decoded = json.loads(data)
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        raise CliError(f"the stream holds something else than events: {one_line(data, limit=80)!r}")
    return decoded


def _data(told: Mapping[str, Any]) -> bytes:
    text = told.get("b64_json")
    try:
        return base64.b64decode(text if isinstance(text, str) else "", validate=True)
    except (binascii.Error, ValueError):
        raise CliError("a picture of the stream is no valid base64") from None


def _size(told: Mapping[str, Any]) -> str:
    return one_line(str(told.get("size") or "unknown size"), limit=20)


def _number(ours: Mapping[str, Any], name: str) -> int | None:
    value = ours.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _cache(ours: Mapping[str, Any]) -> str:
    return one_line(str(ours.get("cache") or ""), limit=40)
