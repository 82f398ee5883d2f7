"""The contact sheet: reference, candidate and their difference side by side, one row for each prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from PIL import Image, ImageChops, ImageDraw, ImageOps

if TYPE_CHECKING:
    from collections.abc import Sequence

_EDGE: Final = 256
_GAP: Final = 8
_LABEL: Final = 28
_BLACK: Final = (0, 0, 0)
_WHITE: Final = (255, 255, 255)


def contact_sheet(rows: Sequence[tuple[str, Image.Image, Image.Image]]) -> Image.Image:
    """Return the sheet of (label, reference, candidate); differences are four times as bright as they are."""
    width = 3 * _EDGE + 4 * _GAP
    height = len(rows) * (_EDGE + _LABEL + _GAP) + _GAP
    sheet = Image.new("RGB", (width, height), _WHITE)
    draw = ImageDraw.Draw(sheet)
    for place, (label, reference, candidate) in enumerate(rows):
        top = _GAP + place * (_EDGE + _LABEL + _GAP)
        draw.text((_GAP, top + 6), label.encode("ascii", "replace").decode()[:120], fill=_BLACK)
        for column, picture in enumerate((reference, candidate, difference(reference, candidate))):
            shown = ImageOps.contain(picture.convert("RGB"), (_EDGE, _EDGE))
            sheet.paste(shown, (_GAP + column * (_EDGE + _GAP), top + _LABEL))
    return sheet


def difference(reference: Image.Image, candidate: Image.Image) -> Image.Image:
    """Return where two pictures differ, brighter for more; a candidate of another size is scaled first."""
    candidate = candidate.convert("RGB").resize(reference.size)
    return ImageChops.difference(reference.convert("RGB"), candidate).point(lambda value: min(255, value * 4))
