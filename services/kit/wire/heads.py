"""Heads of calls as bytes: what makes two equal although each carries a trace of its own. Pure.

A caller whose heads are compressed without a table sends the same bytes for the same headers, so a head is decoded once
and found by its bytes from then on, which costs a hundredth. Only `traceparent` is different in every call.
"""

from typing import Final

from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman

TRACE: Final = "traceparent"
_HUFFMAN: Final = 0x80
_LONG: Final = 0x7F  # a length that goes on in the next byte


def _name(text: str) -> tuple[bytes, bytes]:
    """Return a header's name as it stands in a head (RFC 7541, 5.2): compressed, and as it is."""
    plain = text.encode()
    coded: bytes = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(plain)
    return bytes((_HUFFMAN | len(coded),)) + coded, bytes((len(plain),)) + plain


_NAMES: Final = _name(TRACE)


def untraced(block: bytes) -> bytes:
    """Return a head with its trace made empty; the same bytes when there is none.

    The bytes may be found where they mean something else, so whoever remembers the result decodes it first.
    """
    for name in _NAMES:
        found = block.find(name)
        if found < 0:
            continue
        start = found + len(name)
        length = block[start] & _LONG if start < len(block) else _LONG
        return block if length == _LONG else b"%b\0%b" % (block[:start], block[start + 1 + length :])
    return block


def trace_in(block: bytes) -> str | None:
    """Return the trace that a head carries (RFC 7541, 5.2), or None. It must be one that was decoded before."""
    for name in _NAMES:
        found = block.find(name)
        if found < 0:
            continue
        start = found + len(name) + 1
        length = block[start - 1] & _LONG
        value = block[start : start + length]
        return (decode_huffman(value) if block[start - 1] & _HUFFMAN else value).decode("ascii", "replace")
    return None
