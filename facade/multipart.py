"""Takes multipart/form-data apart."""

from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from facade.translate.forms import MOST_PARTS, Part
from services.kit.errors import DomainError, Reason

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM = "multipart/form-data"


def is_form(content_type: str) -> bool:
    """Whether a request's content type is that of a form."""
    return content_type.partition(";")[0].strip().lower() == FORM


def parts_of(body: bytes, content_type: str) -> list[Part]:
    """Return the parts of a whole body. Raises DomainError invalid_request for what is no form or has too many parts."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise _refused("the content type names no boundary", "content-type")
    collector = _Collector()
    try:
        parser = MultipartParser(boundary, collector.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise _refused(f"it is no valid {FORM}: {error}") from None
    if not collector.ended:
        raise _refused(f"it ends before the last boundary of its {FORM}")
    return collector.parts


class _Collector:
    """What the parser calls back."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._headers: dict[bytes, bytes] = {}
        self._name = b""
        self._value = b""
        self._data = bytearray()

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) == MOST_PARTS:
            raise _refused(f"a form may have at most {MOST_PARTS} parts")
        self._headers = {}
        self._data = bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += memoryview(data)[start:end]

    def _part_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if not name:
            raise _refused(f"part {len(self.parts)} has no name")
        kind = self._headers.get(b"content-type", b"text/plain").lower()
        is_file = b"filename" in options or not kind.startswith((b"text/", b"application/json"))
        self.parts.append(Part(name, bytes(self._data), is_file))

    def _end(self) -> None:
        self.ended = True


def _refused(why: str, field: str = "body") -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, f"'{field}' cannot be read: {why}", field=field)
