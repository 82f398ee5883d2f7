"""Asks for pictures and writes them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cli import http
from cli.errors import CliError, Exit
from cli.image.bar import Bar
from cli.image.reader import Picture, PictureReader
from cli.terminal import human_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cli.settings import CliSettings

FORMATS: Final[Mapping[str, str]] = {".webp": "webp", ".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}
_PATH: Final = "/v1/images/generations"
# As for chats: until admission's deadline a request may wait in silence, and so may a slow model.
_SILENCE_S: Final = 600.0


@dataclass(frozen=True)
class Asked:
    """What is asked for. `fields`: those of the request that were given. `output`: for several, each gets a number."""

    prompt: str
    output: Path
    pictures: int
    previews: int
    fields: Mapping[str, Any]
    tier: str | None = None


def run(asked: Asked, *, url: str, settings: CliSettings) -> None:
    """Make the pictures, write each as it comes and print a line for it. Raises CliError."""
    body = request_body(asked)
    if not asked.output.parent.is_dir():
        raise CliError(f"there is no directory {asked.output.parent}", code=Exit.USAGE)
    key = settings.api_key.get_secret_value()
    headers = {"Authorization": f"Bearer {key}"} if key else None
    client = http.new_client(connect_s=settings.connect_timeout_s, read_s=_SILENCE_S, headers=headers)
    reader = PictureReader(asked.pictures)
    lines: list[str] = []
    try:
        with (
            closing(client),
            Bar() as bar,
            closing(http.stream_events(client, url, _PATH, body, tier=asked.tier)) as items,
        ):
            for item in items:
                event = reader.read(item)
                if isinstance(event, Picture):
                    lines.append(_keep(event, numbered(asked.output, reader.found, asked.pictures)))
                elif event is not None:
                    bar.show(event)
        reader.finish()
    except KeyboardInterrupt:
        raise CliError("stopped", code=Exit.INTERRUPTED) from None
    finally:
        # After the bar has gone, and also for those that were there before something went wrong.
        for line in lines:
            print(line)


def request_body(asked: Asked) -> dict[str, Any]:
    """Return the request. Nothing is sent that was not asked for. Raises CliError for a file name without a known format."""
    suffix = asked.output.suffix.lower()
    if suffix not in FORMATS:
        raise CliError(f"{asked.output} ends in none of {', '.join(FORMATS)}", code=Exit.USAGE)
    if not asked.prompt.strip():
        raise CliError("the prompt is empty", code=Exit.USAGE)
    given = {name: value for name, value in asked.fields.items() if value is not None}
    return {
        "prompt": asked.prompt,
        "stream": True,
        "partial_images": asked.previews,
        "output_format": FORMATS[suffix],
        **({"n": asked.pictures} if asked.pictures > 1 else {}),
        **given,
    }


def numbered(output: Path, number: int, pictures: int) -> Path:
    """Return the file of a picture: `fox.webp` of a lone one, `fox-1.webp` of the first of several."""
    return output if pictures == 1 else output.with_stem(f"{output.stem}-{number}")


def _keep(picture: Picture, path: Path) -> str:
    """Write a picture, whole or not at all; return the line that tells of it."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(picture.data)
        part.replace(path)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror or error}") from error
    details = [picture.size, human_size(len(picture.data))]
    details += [] if picture.seed is None else [f"seed {picture.seed}"]
    details += [] if picture.took_ms is None else [f"{picture.took_ms / 1000:.1f} s"]
    details += [picture.cache] if picture.cache else []
    return f"{path}  {', '.join(details)}"
