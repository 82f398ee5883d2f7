"""Files to pixels and back, by Pillow."""

import io
import warnings
from typing import Final

from PIL import ExifTags, Image, ImageChops, ImageOps, PngImagePlugin, UnidentifiedImageError

from services.diffusion.adapters.engine import Pixels
from services.diffusion.core.options import Encoding, Format, refusal
from services.kit.errors import DomainError, Reason

_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
_TAKEN: Final = ("PNG", "JPEG", "WEBP")
_USER_COMMENT: Final = 0x9286
_FAST: Final = 1


def decode(data: bytes, field: str, *, most_pixels: int) -> Image.Image:
    """Return a picture as RGB or RGBA, upright. Raises DomainError naming the field: `invalid_request`, `too_large`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=_TAKEN)
        check_pixels(picture.width, picture.height, field, most_pixels=most_pixels)
        picture.load()
        upright = ImageOps.exif_transpose(picture)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise refusal(field, "is no PNG, JPEG or WebP picture that can be read") from error
    return upright.convert("RGBA" if has_alpha(upright) else "RGB")


def from_samples(pixels: Pixels, field: str, *, most_pixels: int) -> Image.Image:
    """Return a picture given as samples, as RGB or RGBA. Raises DomainError naming the field."""
    check_pixels(pixels.width, pixels.height, field, most_pixels=most_pixels)
    mode = _MODES.get(pixels.channels)
    if mode is None:
        raise refusal(f"{field}.raw.channels", f"is {pixels.channels}; 1, 3 and 4 are allowed")
    if len(pixels.samples) != pixels.width * pixels.height * pixels.channels:
        wanted = pixels.width * pixels.height * pixels.channels
        raise refusal(f"{field}.raw.samples", f"has {len(pixels.samples)} bytes; the size says {wanted}")
    picture = Image.frombytes(mode, (pixels.width, pixels.height), pixels.samples)
    return picture.convert("RGB") if mode == "L" else picture


def check_pixels(width: int, height: int, field: str, *, most_pixels: int) -> None:
    """Raise DomainError for a picture that is empty or too large."""
    if width < 1 or height < 1:
        raise refusal(field, f"is {width} x {height} pixels")
    if width * height > most_pixels:
        message = f"'{field}' is {width} x {height} pixels; the most is {most_pixels} in all"
        raise DomainError(Reason.TOO_LARGE, message, field=field)


def has_alpha(picture: Image.Image) -> bool:
    """Return whether a picture can be transparent."""
    return picture.mode in {"RGBA", "LA", "PA"} or "transparency" in picture.info


def to_pixels(picture: Image.Image, *, channels: int) -> Pixels:
    """Return a picture as samples."""
    made = picture.convert(_MODES[channels])
    return Pixels(made.width, made.height, channels, made.tobytes())


def scaled(picture: Image.Image, width: int, height: int) -> Image.Image:
    """Return a picture in another size."""
    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def painted(mask: Image.Image) -> Image.Image:
    """Return where a mask wants paint, white: where it is transparent or, without an alpha channel, white."""
    return ImageChops.invert(mask.getchannel("A")) if mask.mode == "RGBA" else mask.convert("L")


def from_pixels(pixels: Pixels) -> Image.Image:
    """Return a picture of samples that are known to be right."""
    return Image.frombytes(_MODES[pixels.channels], (pixels.width, pixels.height), pixels.samples)


def encode(pixels: Pixels, encoding: Encoding, text: str = "") -> bytes:
    """Return a picture as a file, or its samples for RAW. `text`: how it was made, written into the file unless empty."""
    if encoding.format is Format.RAW:
        return pixels.samples
    picture, buffer = from_pixels(pixels), io.BytesIO()
    if encoding.format is Format.PNG:
        notes = PngImagePlugin.PngInfo()
        if text:
            notes.add_itxt("parameters", text)
        picture.save(buffer, "PNG", pnginfo=notes, compress_level=_FAST)
    elif encoding.format is Format.WEBP:
        picture.save(buffer, "WEBP", quality=encoding.quality, method=encoding.effort, exif=_exif(text))
    else:
        picture.convert("RGB").save(buffer, "JPEG", quality=encoding.quality, exif=_exif(text))
    return buffer.getvalue()


def _exif(text: str) -> bytes:
    if not text:
        return b""
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[_USER_COMMENT] = b"UNICODE\0" + text.encode("utf-16-be")
    return exif.tobytes()
