"""The gate in front of local workers: Envoy's ext_proc, where a permit lives exactly as long as an HTTP exchange.

This runs for every proxied request, so it talks to the keeper directly, and what can be remembered is: equal asks are equal
bytes, and nearly all answers are constants. It decides nothing itself.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError
from typing_extensions import override

from services.admission import gate_messages, spans
from services.admission.core.gating import Admissible, Answer, not_understood, receive, refused
from services.admission.core.intake import Intake
from services.admission.core.model import Event, Granted, Refusal, Rejected
from services.admission.keeper import Keeper
from services.kit.wire.callouts import Call, Callouts
from services.kit.wire.line import Line, Opener

if TYPE_CHECKING:
    from opentelemetry.trace import Span

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
# Routes times tiers times clients, with and without a body. More than this are decided anew.
_MOST_KNOWN: Final = 10_000


class Gate:
    """Lets requests in, as `Callouts` bring them."""

    def __init__(self, keeper: Keeper, intake: Intake) -> None:
        self.keeper = keeper
        self.letting_in = {side: gate_messages.admitted(side) for side in ("e0", "e1")}
        self.lost = Lost()
        self._intake = intake
        self._known: dict[bytes, Admissible | Answer] = {}

    def openers(self) -> Mapping[str, Opener]:
        """Return what takes calls, by path."""
        return {f"/{SERVICE}/Process": partial(_Exchange, self)}

    def receive(self, message: bytes) -> tuple[Admissible | Answer, gate_messages.Apart]:
        """Return what a request may do, and what is its own in its message."""
        own = gate_messages.apart(message)
        found = self._known.get(own.message)
        if found is None:
            found = self._decide(message)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[own.message] = found
        return found, own

    def _decide(self, message: bytes) -> Admissible | Answer:
        try:
            ask, tier, client = gate_messages.head(message)
        except DecodeError as error:
            return not_understood(str(error))
        decided = receive(ask, tier, client, self._intake)
        if isinstance(decided, Admissible):
            self.keeper.note_use(decided.upstream, decided.ask)
        return decided

    def drain(self, callouts: Callouts) -> None:
        """End the calls of exchanges that were let in: they go on, and the next admission counts them.

        Whoever waits has been given back to Envoy by then, and so is who comes: they ask the next admission.
        """
        for call in callouts.calls():
            if isinstance(call, _Exchange):
                call.let_run()
        callouts.retire()

    def live(self, callouts: Callouts) -> Counter[str]:
        """Count the exchanges that were let in and whose calls are there, by upstream."""
        return Counter(call.upstream for call in self.let_in(callouts))

    def let_in(self, callouts: Callouts) -> "set[_Exchange]":
        """Return the exchanges that were let in and whose calls are there."""
        return {call for call in callouts.calls() if isinstance(call, _Exchange) and call.is_let_in}


class Lost:
    """Permits of exchanges whose calls ended with their connection: Envoy may be gone, or it has only given us up."""

    def __init__(self) -> None:
        self.happened = asyncio.Event()
        self.tickets: dict[str, list[int]] = {}

    def add(self, upstream: str, ticket: int) -> None:
        """Keep a permit until it is known what became of its exchange."""
        self.tickets.setdefault(upstream, []).append(ticket)
        self.happened.set()

    def over(self, running: Mapping[str, int]) -> list[int]:
        """Return the permits that are over when so many of these exchanges can still be running, by upstream."""
        ended: list[int] = []
        for upstream, tickets in list(self.tickets.items()):
            ended += tickets[max(0, running.get(upstream, 0)) :]
            del tickets[max(0, running.get(upstream, 0)) :]
            if not tickets:
                del self.tickets[upstream]
        return ended


class _Exchange(Call):
    """One HTTP exchange."""

    __slots__ = ("_gate", "_request_id", "_span", "_ticket", "is_let_in", "upstream")

    def __init__(self, gate: Gate, line: Line, number: bytes) -> None:
        super().__init__(line, number)
        self._gate = gate
        self._request_id = ""
        self._span: Span | None = None
        self._ticket: int | None = None
        self.is_let_in = False
        self.upstream = ""

    @override
    def message(self, data: bytes) -> None:
        if not data or data[0] != gate_messages.REQUEST_HEADERS:
            answer = gate_messages.CARRY_ON.get(data[0] if data else 0)
            if answer is not None:
                self.send(answer)
            return
        decided, own = self._gate.receive(data)
        self._request_id = own.request_id
        if isinstance(decided, Answer):
            self.send(gate_messages.instead(decided, self._request_id))
        elif self._ticket is None:
            self.upstream = decided.upstream
            if own.traceparent:
                self._span = spans.waiting(own.traceparent, decided.ask)
            self._ticket = self._gate.keeper.attend(decided.ask, self._hear)

    def _hear(self, _ticket: int, event: Event) -> None:
        if self._span is not None:
            spans.heard(self._span, event)
        if type(event) is Granted:
            self.is_let_in = True
            self.send(self._gate.letting_in[self._gate.keeper.side])
        elif type(event) is Rejected and event.refusal is Refusal.DRAINING:
            self.refuse()
        elif type(event) is Rejected:
            self.send(gate_messages.instead(refused(event), self._request_id))

    @override
    def over(self) -> None:
        spans.over(self._span, "withdrawn")
        if self._ticket is not None:
            self._gate.keeper.leave(self._ticket)

    @override
    def lost(self) -> None:
        if self.is_let_in and self._ticket is not None:
            self._gate.lost.add(self.upstream, self._ticket)
        else:
            self.over()

    def let_run(self) -> None:
        """End the call of an exchange that was let in."""
        if self.is_let_in:
            self.end()
