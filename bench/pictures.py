"""Asks a server with OpenAI's image route for one picture at a time, and says what is wrong with the answer."""

from __future__ import annotations

import base64
import binascii
import io
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx
from PIL import Image, UnidentifiedImageError

if TYPE_CHECKING:
    from collections.abc import Mapping

PATH: Final = "/v1/images/generations"
_LIMIT_S: Final = 1800.0
_FORMATS: Final = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}


class PictureError(Exception):
    """A server that gave no picture."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One picture. `inference_s`: time inside the engine, None where the server does not tell; `ours`: what the mesh adds.

    `faults`: how its envelope or its size differs from what was asked for, one sentence each.
    """

    picture: Image.Image
    wall_s: float
    inference_s: float | None
    ours: Mapping[str, Any]
    faults: tuple[str, ...]

    @property
    def cache(self) -> str:
        """Which exact cache served it; "" for none."""
        return str(self.ours.get("cache") or "")


class Server:
    """One server. `url` is its address without `/v1`."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(timeout=httpx.Timeout(_LIMIT_S, connect=10.0), headers=headers)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def draw(self, body: Mapping[str, Any]) -> Answer:
        """Return the picture that a body asks for. Raises PictureError in one sentence."""
        began_s = time.perf_counter()
        try:
            response = self._client.post(f"{self.url}{PATH}", json=dict(body))
        except httpx.HTTPError as error:
            raise PictureError(f"{self.url} does not answer: {error}") from error
        wall_s = time.perf_counter() - began_s
        if response.status_code != httpx.codes.OK:
            raise PictureError(f"{self.url} answers {response.status_code}: {response.text[:400]}")
        try:
            told = response.json()
        except ValueError:
            raise PictureError(f"{self.url} answers with no JSON") from None
        return read_answer(told, body, wall_s)


def read_answer(told: Any, asked: Mapping[str, Any], wall_s: float) -> Answer:  # noqa: ANN401 - JSON
    """Judge an answer by the request it belongs to. Raises PictureError when it holds no picture."""
    if not isinstance(told, dict) or not isinstance(told.get("data"), list) or not told["data"]:
        raise PictureError("the answer holds no `data`")
    each = told["data"][0]
    picture = _decoded(each.get("b64_json") if isinstance(each, dict) else None)
    size = f"{picture.width}x{picture.height}"
    faults = []
    if not isinstance(told.get("created"), int):
        faults.append(f"`created` is no number of seconds but {told.get('created')!r}")
    if len(told["data"]) != asked.get("n", 1):
        faults.append(f"{len(told['data'])} pictures came; {asked.get('n', 1)} were asked for")
    if asked.get("size", "auto") not in ("auto", size):
        faults.append(f"the picture is {size}; {asked['size']} was asked for")
    if told.get("size") not in (None, size):
        faults.append(f"`size` says {told['size']}; the picture is {size}")
    wanted = told.get("output_format", asked.get("output_format"))
    if wanted is not None and picture.format != _FORMATS.get(wanted):
        faults.append(f"the picture is a {picture.format}; {wanted} was said")
    ours = each.get("omniserve") or {}
    spent_ms = ours.get("inference_time_ms", each.get("inference_time_ms", told.get("inference_time_ms")))
    inference_s = spent_ms / 1000 if isinstance(spent_ms, int | float) else None
    return Answer(picture, wall_s, inference_s, ours, tuple(faults))


def _decoded(text: object) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(text if isinstance(text, str) else "", validate=True)))
        picture.load()
    except (binascii.Error, ValueError, UnidentifiedImageError, OSError) as error:
        raise PictureError(f"the answer holds no picture: {error}") from None
    return picture
