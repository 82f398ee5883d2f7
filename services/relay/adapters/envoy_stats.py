"""Envoy's counters, read through its operator listener."""

import asyncio
from dataclasses import dataclass
from typing import Final

from services.kit import telemetry
from services.kit.clock import Clock
from services.kit.http_client import OnDemand, httpx
from services.relay.core.stats import FILTER, EdgeStats, parse

TIMEOUT_S: Final = 1.0
_PATH: Final = "/admin/envoy/stats"
_log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters and when they were read, on the monotonic clock; None when they never were."""

    stats: EdgeStats
    at: float | None
    reachable: bool


class EnvoyStats:
    """Reads them when asked, and at most once in `interval_s`; keeps the last reading. `address`: the operator listener."""

    def __init__(self, address: str, clock: Clock, *, interval_s: float) -> None:
        self._url = f"http://{address}{_PATH}"
        self._clock = clock
        self._interval_s = interval_s
        self._client = OnDemand(
            lambda: httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, headers={"host": "localhost"})
        )
        self._turn = asyncio.Lock()
        self._last = Reading(EdgeStats({}), None, reachable=False)
        self._tried_at: float | None = None

    async def read(self, *, fresh: bool = False) -> Reading:
        """Return the counters; the last known ones when Envoy does not answer. `fresh`: not older than this call."""
        async with self._turn:  # callers that come together share one reading
            now = self._clock.monotonic()
            if fresh or self._tried_at is None or now - self._tried_at >= self._interval_s:
                self._tried_at = now
                self._last = await self._ask(now)
            return self._last

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def _ask(self, now: float) -> Reading:
        try:
            answer = await self._client().get(self._url, params={"format": "json", "filter": FILTER})
            answer.raise_for_status()
            return Reading(parse(answer.json()), now, reachable=True)
        except (httpx.HTTPError, ValueError) as error:
            if self._last.reachable:
                _log.warning("envoy's counters cannot be read", error=repr(error))
            return Reading(self._last.stats, self._last.at, reachable=False)
