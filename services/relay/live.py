"""The owner of what is not in the settings: endpoints that services set, drained ones, and groups short of memory.

Changes happen one at a time on the event loop; each is rendered and judged like a change of the settings, and taken back
when it was refused.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from services.kit import telemetry
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.relay.control import Control
from services.relay.core.endpoints import (
    Contribution,
    Live,
    Owned,
    merged,
    next_end,
    pass_over,
    with_contribution,
    with_drained,
    without_ended,
    without_local,
)
from services.relay.core.model import Credential, Endpoint, GroupKind, RelayInputs, Upstream

LOOKED_EVERY_S: Final = 1.0
"""How often it is looked whether a group wants to know the device's free memory; endpoints end to the moment."""
SETTLED_S: Final = 0.05
"""Envoy takes new files within some 10 ms."""

_log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """What an owner wants a group to have. `ttl_s`: seconds until it ends without another call."""

    owned: Owned
    endpoints: tuple[Endpoint, ...]
    credential: Credential | None
    generation: int
    ttl_s: int


class LiveEndpoints:
    """Owns them. `free_mib` tells the device's free memory, None when it is not known; it may block for a moment."""

    def __init__(self, clock: Clock, free_mib: Callable[[], int | None] = lambda: None) -> None:
        self._clock = clock
        self._free_mib = free_mib
        self._live = Live()
        self._passed_over: frozenset[str] = frozenset()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    def applied(self, inputs: RelayInputs) -> RelayInputs:
        """Return the settings' inputs with everything live in them. Touches nothing."""
        return replace(inputs, upstreams=MappingProxyType(self._effective(inputs.upstreams)))

    async def set_endpoints(self, control: Control, change: Change) -> None:
        """Put an owner's endpoints in force; returns when Envoy can use them.

        Raises DomainError: not_found, conflict, invalid_request; what was in force then stays.
        """
        async with self._turn:
            now = self._clock.monotonic()
            new = Contribution(change.endpoints, change.credential, change.generation, now + change.ttl_s)
            await self._adopt(
                control,
                with_contribution(self._live, change.owned, new, control.state.inputs.upstreams, now),
                "endpoints",
            )
        self._changed.set()

    async def drain(self, control: Control, upstream: str, address: str, *, drained: bool) -> None:
        """Take an endpoint out of use, or put it back. Raises DomainError not_found, invalid_request."""
        async with self._turn:
            upstreams = control.state.inputs.upstreams
            await self._adopt(
                control, with_drained(self._live, upstreams, upstream, address, drained=drained), "address"
            )

    async def run(self, control: Control) -> None:
        """End endpoints whose time is over, and watch the device's memory, for ever."""
        while True:
            self._changed.clear()
            await self._look(control)
            ends_at, now = next_end(self._live), self._clock.monotonic()
            wait_s = LOOKED_EVERY_S if ends_at is None else min(LOOKED_EVERY_S, max(0.0, ends_at - now))
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _look(self, control: Control) -> None:
        free_mib = await asyncio.to_thread(self._free_mib) if self._wants_memory(control) else None
        async with self._turn:
            live = without_ended(self._live, self._clock.monotonic())
            upstreams = control.state.inputs.upstreams.values()
            passed = frozenset(
                each.name
                for each in upstreams
                if pass_over(merged(each, live), free_mib, passed_before=each.name in self._passed_over)
            )
            if live is self._live and passed == self._passed_over:
                return
            _log.info("live endpoints have changed", ended=live is not self._live, passed_over=sorted(passed))
            self._live, self._passed_over = live, passed
            await control.refresh()

    async def _adopt(self, control: Control, live: Live, field: str) -> None:
        """Put a change in force, or take it back and say why."""
        before, self._live = self._live, live
        try:
            state = await control.refresh()
        except BaseException:
            self._live = before
            raise
        if not _is_current(control):
            self._live = before
            await control.refresh()
            why = "; ".join(str(problem) for problem in state.problems) or "the configuration was refused"
            raise DomainError(Reason.INVALID_REQUEST, why, field=field)
        await asyncio.sleep(SETTLED_S)

    def _effective(self, upstreams: Mapping[str, Upstream]) -> dict[str, Upstream]:
        found = {name: merged(each, self._live) for name, each in upstreams.items()}
        return {name: without_local(each) if name in self._passed_over else each for name, each in found.items()}

    def _wants_memory(self, control: Control) -> bool:
        groups = (each.group(GroupKind.LOCAL) for each in control.state.inputs.upstreams.values())
        return any(group is not None and group.min_free_mib for group in groups)


def _is_current(control: Control) -> bool:
    """Return whether what is in force is what settings and live endpoints ask for now."""
    return control.render(control.state.inputs).version == control.state.rendered.version
