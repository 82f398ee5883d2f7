"""Text out of token bytes: only whole UTF-8 characters leave, what is invalid becomes U+FFFD."""

import codecs


class Utf8Stream:
    """Turns a stream of byte pieces into text. Equal to decoding all bytes at once with errors="replace"."""

    __slots__ = ("_decoder", "_open")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = False

    @property
    def open(self) -> bool:
        """Whether a character has begun and not ended."""
        return self._open

    def push(self, piece: bytes) -> str:
        """Return the characters that are whole now."""
        text = self._decoder.decode(piece)
        self._open = bool(self._decoder.getstate()[0])
        return text

    def end(self) -> str:
        """Return what is left: U+FFFD for a character that was cut off, else nothing."""
        self._open = False
        return self._decoder.decode(b"", final=True)
