"""How fast an answer came. Pure: the times are arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.chat.stream import Usage


_WORTH_TELLING_MS = 10


@dataclass
class Stopwatch:
    """Times of one answer in seconds of one monotonic clock; None until it happened."""

    asked: float
    first: float | None = None
    last: float | None = None

    def piece(self, now: float) -> None:
        """Note that a piece of the answer came."""
        self.first = now if self.first is None else self.first
        self.last = now


def describe(watch: Stopwatch, usage: Usage | None) -> str:
    """Return one line: tokens, tokens per second after the first one, time to the first, and what the prompt cost."""
    if watch.first is None or watch.last is None:
        return "no tokens"
    first = f"first after {watch.first - watch.asked:.2f} s"
    if usage is None:
        return first
    # The engine's own time where it is told: pieces that arrive together would make the rate look better than it was.
    seconds = usage.decode_ms / 1000 or watch.last - watch.first
    rate = (
        f", {(usage.completion_tokens - 1) / seconds:.1f} tokens/s"
        if usage.completion_tokens > 1 and seconds > 0
        else ""
    )
    queued = f" ({usage.queue_ms / 1000:.2f} s queued)" if usage.queue_ms >= _WORTH_TELLING_MS else ""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return f"{usage.completion_tokens} tokens{rate}, {first}{queued}, prompt {usage.prompt_tokens} tokens{cached}"
