"""The one owner of what is in memory: carries out what `core/residency.py` decides, and counts who waits and who uses."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from services.kit import telemetry
from services.kit.asking import Asking, Permit
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.coordinators import Coordinators
from services.kit.hosts.core import residency as core
from services.kit.hosts.core.claims import ENDS, End
from services.kit.hosts.core.lifecycle import BackOff, State
from services.kit.hosts.core.residency import Residency
from services.kit.hosts.core.seats import Phase, Policy, Seat, Waiter
from services.kit.hosts.handover import HandOver
from services.kit.hosts.keeper import EngineUnusableError
from services.kit.hosts.leases import Claim, Leases, NoRoomError, Yield
from services.kit.hosts.resident import Resident, Trouble
from services.kit.hosts.served import Served
from services.kit.owner import Owner

TIER_RANKS: Final = {"background": 0, "free": 1, "sub": 2, "paid": 3}
_TIERS: Final = {rank: tier for tier, rank in TIER_RANKS.items()}
_OPERATOR_RANK: Final = max(TIER_RANKS.values())
OPERATOR: Final = "operator"
"""Stands where a tier does: the operator's loads, and those at the start, come first and need no permit."""
RECHECK_S: Final = 1.0
"""How long a refusal of memory counts, when no other model of this service can make room."""
SETTLE_S: Final = 2.0
"""How long a load waits for memory that a model has just left, or that others may give, to be measured free."""
_log = telemetry.logger(__name__)
S = TypeVar("S", bound=Served)
R = TypeVar("R", bound=Resident[Any])


def _nothing_to_tidy(unloaded: Sequence[Any], now_s: float) -> None:
    """Do nothing, never again."""


class Permits(Protocol):
    """Where permits come from: kit's PermitClient."""

    def permit(
        self, *, modality: str, tier: str, principal: str, request_id: str
    ) -> AbstractAsyncContextManager[Permit]:
        """Wait for a permit and hold it for the length of the block. Raises DomainError when there is none."""

    def ask(
        self,
        *,
        modality: str,
        tier: str,
        principal: str,
        request_id: str,
        may_wait: bool,
        on_queued: Callable[[int, int | None], None],
    ) -> AbstractAsyncContextManager[Asking]:
        """Ask for a permit; leaving the block gives it back or withdraws the ask."""


@dataclass(slots=True)
class Wait:
    """Somebody who waits for a model. `left_s`: how long it still may."""

    ticket: int
    left_s: float
    error: DomainError | None = None


class Hosting(Generic[S, R]):
    """Runs the hosts of all models. `run` must be running. `on_change` hears when the state of an engine has changed.

    `make`: returns a resident of a key and a model, which tells its third argument of every change of state. `tidy`: told which
    models are not in memory whenever something was decided, returns when to be told again. `principal`: who asks for the permits
    of loads.
    """

    def __init__(
        self,
        *,
        permits: Permits,
        leases: Leases,
        coordinators: Coordinators,
        clock: Clock,
        owner: Owner,
        policy: Policy,
        make: Callable[[int, S, Callable[[R], None]], R],
        principal: str,
        load_wait_s: float,
        tidy: Callable[[Sequence[R], float], float | None] = _nothing_to_tidy,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.load_wait_s = load_wait_s
        self._permits = permits
        self._leases = leases
        self._hand_over = HandOver(coordinators, owner)
        self._clock = clock
        self._owner = owner
        self._make = make
        self._principal = principal
        self._tidy = tidy
        self._residency = Residency(policy)
        self._all: dict[int, R] = {}
        self._waits: dict[int, dict[int, Wait]] = {}
        self._seen: dict[int, tuple[Phase, bool]] = {}
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()
        self._back_off = BackOff(first_s=1.0)
        self._listening: asyncio.Task[None] | None = None

    # ---- models -----------------------------------------------------------------------------------------------

    def add(self, served: S) -> R:
        """Know a model that is not in memory."""
        key = next(self._numbers)
        resident = self._all[key] = self._make(key, served, self._state_changed)
        self._waits[key] = {}
        self._leases.expect(served)
        self._residency.add(key, need_mib=self._leases.size_mib(served), pinned=served.pinned, ttl_s=served.ttl_s)
        return resident

    def adjust(self, resident: R, served: S) -> None:
        """Keep a model, whose host stays as it is, as the catalogue says now."""
        resident.served = served
        self._residency.adjust(resident.key, pinned=served.pinned, ttl_s=served.ttl_s)
        self._poke()

    def retire(self, resident: R) -> None:
        """Let a model go when nobody uses it any more."""
        resident.retired, resident.is_required = True, False
        self._residency.hold(resident.key, held=True)
        self._owner.start(self._see_off(resident), name=f"retire {resident.name}")
        self._poke()
        resident.tell()

    async def _see_off(self, resident: R) -> None:
        seat = self._residency.seat(resident.key)
        while seat.active:
            await resident.changed.wait()
        self._do(self._residency.dismiss(resident.key))
        while seat.phase is not Phase.ABSENT or resident.visitors or self._waits[resident.key]:
            await resident.changed.wait()
        for task in resident.companions():
            task.cancel()
            await asyncio.wait([task])
        self._residency.forget(resident.key)
        del self._all[resident.key], self._waits[resident.key]
        self._seen.pop(resident.key, None)

    # ---- who waits, who uses ----------------------------------------------------------------------------------

    def usable(self, resident: R) -> bool:
        """Return whether a request may use a model now."""
        return self._residency.usable(resident.key) and resident.host.report.state is State.READY

    @contextmanager
    def waiting(self, resident: R, tier: str) -> Iterator[Wait]:
        """Want a model for the length of the block; see Wait.error."""
        operator = tier == OPERATOR
        rank = _OPERATOR_RANK if operator else TIER_RANKS.get(tier, TIER_RANKS["free"])
        wait = Wait(next(self._numbers), self.load_wait_s)
        waiter = Waiter(rank, self._clock.monotonic(), operator)
        self._waits[resident.key][wait.ticket] = wait
        self._residency.want(resident.key, wait.ticket, waiter)
        if not self.usable(resident):
            self._poke()
        try:
            yield wait
        finally:
            self.end_wait(resident, wait)

    def end_wait(self, resident: R, wait: Wait) -> None:
        """Want a model no more."""
        if self._waits[resident.key].pop(wait.ticket, None) is not None:
            self._residency.leave(resident.key, wait.ticket)
            self._poke()
            if resident.retired:
                resident.tell()

    @contextmanager
    def using(self, resident: R) -> Iterator[None]:
        """Use a model, which must be usable, for the length of the block."""
        self._residency.begin(resident.key)
        try:
            yield
        finally:
            self._residency.end(resident.key, self._clock.monotonic())
            self._poke()
            if self._residency.seat(resident.key).held:
                resident.tell()

    def seat(self, resident: R) -> Seat:
        """Return a model's seat, to be read."""
        return self._residency.seat(resident.key)

    def hold(self, resident: R, *, held: bool) -> None:
        """Let nobody use or load a model, or let them again."""
        self._residency.hold(resident.key, held=held)
        self._poke()

    @contextmanager
    def held(self, resident: R) -> Iterator[None]:
        """Let nobody use or load a model for the length of the block."""
        self.hold(resident, held=True)
        try:
            yield
        finally:
            if not resident.retired:
                self.hold(resident, held=False)

    async def empty(self, resident: R, wait_s: float) -> None:
        """Unload a model that is held. Raises DomainError `upstream_timeout` when it is used for longer than that."""
        seat = self._residency.seat(resident.key)
        try:
            async with asyncio.timeout(wait_s):
                while seat.active:
                    await resident.changed.wait()
        except TimeoutError:
            message = f"{seat.active} requests still run on {resident.name!r} after {wait_s:g} s"
            raise DomainError(Reason.UPSTREAM_TIMEOUT, message, field="wait_ms", retry_after_ms=2_000) from None
        if not resident.retired:  # else it is seen off already
            self._do(self._residency.dismiss(resident.key))
        while seat.phase is not Phase.ABSENT:
            await resident.changed.wait()

    # ---- memory -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decide and carry out, for ever."""
        self._listening = self._owner.start(self._leases.run(self.give), name="memory that others need")
        while True:
            self._news.clear()
            now_s = self._clock.monotonic()
            decision = self._residency.decide(now_s)
            self._do(decision.actions)
            self._announce()
            unloaded = [each for key, each in self._all.items() if self._residency.seat(key).phase is Phase.ABSENT]
            tidy_s = self._tidy(unloaded, now_s)
            again = [at_s for at_s in (decision.again_s, tidy_s) if at_s is not None]
            try:
                async with asyncio.timeout(min(again) - now_s if again else None):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """End all hosts and give their memory back."""
        for key in self._all:
            self._residency.hold(key, held=True)
        ending = [each.life for each in self._all.values() if each.life is not None]
        ending += [self._listening] if self._listening is not None else []
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    def _poke(self) -> None:
        self._news.set()

    def _announce(self) -> None:
        """Wake who waits for a model whose memory or openness has changed."""
        for key, resident in self._all.items():
            seen = self._residency.seat(key).phase, self.usable(resident)
            if self._seen.get(key) != seen:
                self._seen[key] = seen
                resident.tell()

    def _do(self, actions: Sequence[core.Action]) -> None:
        for action in actions:
            resident = self._all[action.key]
            match action:
                case core.Ask():
                    resident.rank = action.rank
                    task = self._owner.start(self._ask_leave(resident, action), name=f"leave to load {resident.name}")
                    resident.asking = task
                case core.Withdraw():
                    if resident.asking is not None:
                        resident.asking.cancel()
                case core.Load():
                    resident.life = self._owner.start(self._live(resident), name=f"host of {resident.name}")
                    resident.life.add_done_callback(partial(self._died, resident))
                case core.Unload():
                    if resident.life is not None:
                        resident.life.cancel()
                case core.Refuse(need_mib=need_mib, most_mib=most_mib):
                    message = f"{resident.name!r} needs {need_mib} MiB; pinned models leave {most_mib}"
                    self.fail(resident, DomainError(Reason.NO_CAPACITY, message, retry_after_ms=60_000))
        if actions:
            self._poke()

    async def _ask_leave(self, resident: R, ask: core.Ask) -> None:
        """Load a model under a permit of the load's own; the operator needs none."""
        try:
            if ask.operator:
                await self._load(resident)
                return
            async with self._permits.permit(
                modality=resident.served.modality,
                tier=_TIERS[ask.rank],
                principal=self._principal,
                request_id=f"load {resident.name}",
            ):
                await self._load(resident)
        except DomainError as error:
            self.fail(resident, error)
        finally:
            if resident.asking is asyncio.current_task():
                resident.asking = None
                self._residency.refused_leave(resident.key)
                self._poke()

    async def _load(self, resident: R) -> None:
        _, actions = self._residency.commit(resident.key, self._clock.monotonic())
        resident.asking = None
        self._do(actions)
        self._poke()
        seat = self._residency.seat(resident.key)
        while seat.phase in {Phase.ADMITTED, Phase.LOADING}:
            await resident.changed.wait()

    async def _live(self, resident: R) -> None:
        """Run a model's host until it is cancelled or the load is given up."""
        seat = self._residency.seat(resident.key)
        waits = self._residency.should_wait(resident.key, self._clock.monotonic(), SETTLE_S)
        want = self._leases.want(
            resident.served,
            size_mib=seat.need_mib,
            rank=resident.rank,
            wait_s=SETTLE_S if waits else 0.0,
            reload_s=seat.reload_s or None,
        )
        self._leases.expect(resident.served)
        claim = resident.claim = Claim(lambda: resident.host.report.pid, partial(self._lost, resident))
        try:
            async with self._hand_over.holding(resident), self._leases.lease(want, claim):
                claim.end = End.LOAD_FAILED
                try:
                    await resident.host.supervise()
                except asyncio.CancelledError:
                    claim.end = ENDS[seat.why] if seat.phase is Phase.LEAVING else End.SHUTDOWN
                    raise
        except EngineUnusableError:
            if resident.is_required:
                raise
        except NoRoomError as refused:
            self._fell_short(resident, refused)
            return
        except DomainError as refused:
            self.fail(resident, refused)
            return
        self._give_up(resident)

    def _fell_short(self, resident: R, refused: NoRoomError) -> None:
        """Make room among our own models for one that the broker has none for, or ask it again in a moment."""
        resident.shortage = refused.message
        again_s = self._clock.monotonic() + RECHECK_S
        if refused.room_mib is None:  # nobody knows what is free, and nobody is driven out for that
            self._residency.rest(resident.key, again_s)
        else:
            self._residency.capped(resident.key, refused.room_mib, again_s)

    def _give_up(self, resident: R) -> None:
        """Tell who waits for a model that it cannot be loaded, and have those back that left for it."""
        why = resident.host.report.failure or "its host died"
        resident.failures += 1
        now_s = self._clock.monotonic()
        pause_s = self._back_off.pause_s(resident.failures + 1)
        self._residency.rest(resident.key, now_s + pause_s)
        for key in self._residency.take_displaced(resident.key):
            if key in self._all:
                self._owner.start(self._restore(self._all[key]), name=f"restore {self._all[key].name}")
        if resident.is_required:
            return  # who waits for it waits on: it will be tried for ever
        message = f"the model {resident.name!r} cannot be loaded: {why}"
        error = DomainError(Reason.ENGINE_FAILED, message, field="model", retry_after_ms=round(pause_s * 1000))
        resident.trouble = Trouble(error, now_s + pause_s)
        self.fail(resident, error)

    def _died(self, resident: R, _: asyncio.Task[None]) -> None:
        """Credit a model's memory: its process is gone. Not in the task itself: cancelled early, it never begins."""
        resident.life = resident.claim = None
        self._residency.gone(resident.key, self._clock.monotonic())
        self._residency.resize(resident.key, self._leases.size_mib(resident.served))
        self._poke()

    async def _restore(self, resident: R) -> None:
        """Have a model in memory again that has left in vain."""
        with self.waiting(resident, "background") as wait, suppress(TimeoutError):
            async with asyncio.timeout(self.load_wait_s):
                while not (self.usable(resident) or resident.retired or wait.error):
                    await resident.changed.wait()

    def give(self, claim: Claim, reclaim_id: str) -> Yield:
        """Begin to give the memory of a model to another process, if nobody here wants it."""
        resident = next((each for each in self._all.values() if each.claim is claim), None)
        if resident is None:
            return Yield(begun=False)
        actions = self._residency.give(resident.key)
        if actions:
            claim.reclaim_id = reclaim_id
            self._do(actions)
        return Yield(begun=bool(actions), pinned=resident.served.pinned)

    def _lost(self, resident: R, why: str) -> None:
        """Let a model leave whose lease is over and was denied anew; a pinned one stays, and the lease is asked for on."""
        _log.warning("a lease was lost", model=resident.name, why=why, stays=resident.served.pinned)
        if not resident.served.pinned:
            self._residency.lose(resident.key)
            self._poke()

    def fail(self, resident: R, error: DomainError) -> None:
        """Tell those who wait for a model that they wait in vain."""
        waits = self._waits[resident.key]
        for wait in waits.values():
            wait.error = error
            self._residency.leave(resident.key, wait.ticket)
        waits.clear()
        resident.tell()
        self._poke()

    def _state_changed(self, resident: R) -> None:
        state = resident.host.report.state
        if state is State.READY:
            resident.shortage = ""
            self._residency.loaded(resident.key, self._clock.monotonic())
            if resident.claim is not None:
                resident.claim.end = End.CRASHED  # unless it is ended on purpose
                resident.claim.news.set()
        self.on_change()
        self._poke()
