"""Frames of HTTP/2 (RFC 9113) and headers without compression (RFC 7541, 6.2.2), as bytes. Pure."""

from typing import Final

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL, FLOW_CONTROL, FRAME_SIZE, REFUSED, COMPRESSION, CALM = 0x0, 0x1, 0x3, 0x6, 0x7, 0x9, 0xB
TABLE_SIZE, MOST_STREAMS, INITIAL_WINDOW, LONGEST_LIST = 1, 3, 4, 6
"""Numbers of settings."""

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WHOLE: Final = b"\0\0\0\0"
"""The connection's own number."""

NO_TABLE: Final = b"\x20"
"""Says at the start of a head that no header is remembered (RFC 7541, 6.3)."""

FRAME_HEAD: Final = 9
LONGEST_FRAME: Final = 16_384
"""What every peer takes, and the most that is taken here."""
FIRST_WINDOW: Final = 65_535
"""What may be sent on a stream or a connection before the peer has said anything about it."""


def frame(kind: int, flags: int, number: bytes, payload: bytes) -> bytes:
    """Return a frame."""
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, number, payload)


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header that no table remembers, not compressed; the name is shorter than 127 bytes."""
    return b"\0%c%b%b%b" % (len(name), name, _length(value), value)


def _length(value: bytes) -> bytes:
    if len(value) < 127:
        return bytes((len(value),))
    rest, parts = len(value) - 127, bytearray(b"\x7f")
    while rest >= 128:
        parts.append(rest % 128 + 128)
        rest //= 128
    return bytes(parts + bytes((rest,)))


def setting(number: int, value: int) -> bytes:
    """Return one setting of a SETTINGS frame."""
    return number.to_bytes(2, "big") + value.to_bytes(4, "big")


def settings_in(payload: bytes) -> dict[int, int]:
    """Return the settings of a SETTINGS frame."""
    return {
        int.from_bytes(payload[at : at + 2], "big"): int.from_bytes(payload[at + 2 : at + 6], "big")
        for at in range(0, len(payload) - 5, 6)
    }


def heading(number: bytes, block: bytes, *, is_last: bool) -> bytes:
    """Return the frames of a block of headers, however long; `is_last` when the stream ends with it."""
    end = END_STREAM if is_last else 0
    if len(block) <= LONGEST_FRAME:
        return frame(HEADERS, end | END_HEADERS, number, block)
    parts = [block[at : at + LONGEST_FRAME] for at in range(0, len(block), LONGEST_FRAME)]
    middle = b"".join(frame(CONTINUATION, 0, number, part) for part in parts[1:-1])
    return frame(HEADERS, end, number, parts[0]) + middle + frame(CONTINUATION, END_HEADERS, number, parts[-1])


def unpadded(payload: bytes) -> bytes | None:
    """Return what a padded frame carries; None when it says more padding than there is frame."""
    if not payload or payload[0] >= len(payload):
        return None
    return payload[1 : len(payload) - payload[0]]
