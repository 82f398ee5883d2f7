"""When a grammar begins to hold: after the thoughts, and after the opening of a call."""

from dataclasses import dataclass, replace
from typing import Final

_FRESH: Final = 64


@dataclass(frozen=True, slots=True)
class Watch:
    """Looks for the place from which the output has to obey.

    `triggers`: one of these comes right before it; without any, it is the end of the thoughts. `anchored`: a trigger counts
    only where nothing but space precedes it. `thoughts`: the marks around what does not count; `inside`: they are open.
    """

    triggers: tuple[bytes, ...]
    anchored: bool = False
    thoughts: tuple[bytes, bytes] | None = None
    inside: bool = False
    tail: bytes = b""
    fresh: bool = True

    def seen(self, piece: bytes) -> "tuple[Watch, bytes | None]":
        """Return the watch after a piece of output, and what of it already has to obey; None while nothing has."""
        text = self.tail + piece
        if self.inside and self.thoughts is not None:
            before, closing, after = text.partition(self.thoughts[1])
            if not closing:
                return replace(self, tail=before[-len(self.thoughts[1]) :]), None
            if not self.triggers:
                return self, after
            return replace(self, inside=False, tail=b"", fresh=True).seen(after)
        begun = text.lstrip()
        if self.thoughts is not None and self.fresh and begun.startswith(self.thoughts[0]):
            return replace(self, inside=True, tail=b"").seen(begun[len(self.thoughts[0]) :])
        rest = self._after_trigger(text, begun)
        if rest is not None:
            return self, rest
        fresh = self.fresh and len(begun) < _FRESH
        reach = max(map(len, self.triggers), default=0)
        return replace(self, tail=text if fresh else text[-reach:], fresh=fresh), None

    def _after_trigger(self, text: bytes, begun: bytes) -> bytes | None:
        if self.anchored:
            hits = [each for each in self.triggers if self.fresh and begun.startswith(each)]
            return begun[len(hits[0]) :] if hits else None
        found = [(text.index(each), each) for each in self.triggers if each in text]
        if not found:
            return None
        at, trigger = min(found)
        return text[at + len(trigger) :]
