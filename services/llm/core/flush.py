"""When output leaves the host: the first token at once, then one message for all requests every few milliseconds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """`interval_s`: least time between two messages that carry nothing urgent; 25 ms lets 40 tokens/s through as they come."""

    interval_s: float = 0.025

    def due(self, *, now_s: float, last_s: float, urgent: bool) -> bool:
        """Return whether to send now. `urgent`: a request's first text or its end waits to be told."""
        return urgent or now_s - last_s >= self.interval_s
