"""Other processes that must not begin anything while a model is loaded: asked to hold, one after the other, and released."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from services.kit import telemetry
from services.kit.http_client import OnDemand, httpx

_RELEASE_S: Final = 10.0
_MARGIN_S: Final = 60
_log = telemetry.logger(__name__)


class NotHeldError(Exception):
    """A process did not hold; the message says which and why."""


@asynccontextmanager
async def open_coordinators(bases: Sequence[str], *, wait_s: float, load_s: float) -> AsyncIterator["Coordinators"]:
    """Give the coordinators, with a client of their own, for the length of a block; arguments as Coordinators has them."""
    http = OnDemand(lambda: httpx.AsyncClient(trust_env=False))
    try:
        yield Coordinators(bases, http, wait_s=wait_s, load_s=load_s)
    finally:
        await http.aclose()


class Coordinators:
    """Processes by the base of their addresses, in the order in which they are asked.

    `http`: makes the client that asks, or gives it again. `wait_s`: how long each may take to say that it holds. A hold ends
    by itself after a time, whatever becomes of us.
    """

    def __init__(
        self, bases: Sequence[str], http: "Callable[[], httpx.AsyncClient]", *, wait_s: float, load_s: float
    ) -> None:
        self._bases = tuple(base.rstrip("/") for base in bases)
        self._http = http
        self._wait_s = wait_s
        self._seconds = min(3600, round(wait_s * len(bases) + load_s) + _MARGIN_S)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Let nobody begin for the length of the block; afterwards the last who was asked is released first.

        Raises NotHeldError when one does not hold; those before it are released then.
        """
        async with AsyncExitStack() as held:
            for base in self._bases:
                # Before it is asked: one whose answer is lost may hold all the same.
                held.push_async_callback(self._release, base)
                await self._hold(base)
            yield

    async def _hold(self, base: str) -> None:
        try:
            answer = await self._http().post(
                f"{base}/admin/hold", params={"seconds": self._seconds}, json={}, timeout=self._wait_s
            )
        except httpx.HTTPError as error:
            raise NotHeldError(f"{base} did not hold: {type(error).__name__} {error}".rstrip()) from error
        if not answer.is_success:
            raise NotHeldError(f"{base} did not hold: {answer.status_code} {answer.text[:200]}")
        if _is_busy(answer):
            raise NotHeldError(f"{base} holds, but what it runs has not ended within {self._wait_s:g} s")

    async def _release(self, base: str) -> None:
        try:
            async with asyncio.timeout(_RELEASE_S):
                answer = await self._http().post(f"{base}/admin/release", json={})
        except (httpx.HTTPError, TimeoutError) as error:
            _log.warning("a hold was not released; it ends by itself", peer=base, why=str(error))
            return
        if not answer.is_success:
            _log.warning("a hold was not released; it ends by itself", peer=base, status=answer.status_code)


def _is_busy(answer: "httpx.Response") -> bool:
    """Return whether a process says that something still runs; many say nothing about it."""
    try:
        said = answer.json()
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("drained") is False
