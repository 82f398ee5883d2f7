"""Sessions that come, break, return, forget and die in any order: nobody holds what the desk does not count."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.admission.core.desk import Delivery, Desk, Held, Memory
from services.admission.core.model import Ask, Granted, Modality, PoolSpec, Queued, Rejected, Rules, Tier
from services.admission.core.scheduler import Scheduler
from services.admission.core.sessions import SessionState
from services.admission.core.snapshot import view
from tests.fixtures.amounts import amount

SLOTS = 3
GRACE_S, SETTLE_S = 5.0, 3.0
NAMES = ("a", "b", "c")


class Client:
    """An engine service as it sees itself."""

    def __init__(self) -> None:
        self.connected = False
        self.holds: dict[int, tuple[str, Ask]] = {}
        self.waits: dict[int, Ask] = {}


class DeskMachine(RuleBasedStateMachine):
    """Three services, one pool, restarts of admission."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.epoch = 0
        self.tickets = 0
        self.ask_ids = 0
        self.clients = {name: Client() for name in NAMES}
        self.overdraft_possible = False
        self.desk = self.new_desk(Memory((), ()))

    def new_desk(self, past: Memory) -> Desk:
        self.epoch += 1
        self.tickets = 0
        scheduler = Scheduler([PoolSpec("gpu0", SLOTS)], Rules())
        return Desk(scheduler, epoch=self.epoch, past=past, grace_s=GRACE_S, settle_s=SETTLE_S, now=self.now)

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def deliver(self, deliveries: list[Delivery]) -> None:
        for name, number, event in deliveries:
            assert name is not None
            client = self.clients[name]
            if not client.connected:
                assert not isinstance(event, Granted), "granted to a session that cannot hear it"
                continue
            match event:
                case Granted(ticket=ticket):
                    client.holds[number] = (self.desk.permit_id(ticket), client.waits.pop(number))
                case Rejected():
                    client.waits.pop(number, None)
                case Queued(position=position):
                    assert position >= 1, "nobody parks here but who is lost"

    # ---- what services do -----------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def connect(self, name: str) -> None:
        client = self.clients[name]
        if client.connected:
            return
        brought = [(self.ticket(), Held(i, permit, ask)) for i, (permit, ask) in client.holds.items()]
        deliveries = self.desk.open_session(name, "llm", brought, self.now)
        client.connected = True
        self.deliver(deliveries)
        for ask_id, ask in list(client.waits.items()):
            self.deliver(self.desk.session_ask(name, ask_id, self.ticket(), ask, self.now))

    @rule(name=st.sampled_from(NAMES))
    def break_stream(self, name: str) -> None:
        if self.clients[name].connected:
            self.clients[name].connected = False
            self.deliver(self.desk.lose_session(name, self.now))

    @rule(name=st.sampled_from(NAMES), clean=st.booleans())
    def die(self, name: str, clean: bool) -> None:
        if clean != self.clients[name].connected:
            return
        self.clients[name] = Client()
        self.deliver(self.desk.end_session(name, self.now))

    @rule(
        name=st.sampled_from(NAMES),
        units=st.integers(1, SLOTS),
        tier=st.sampled_from([Tier.FREE, Tier.PAID, Tier.BACKGROUND]),
        wait_s=st.sampled_from([1.0, 50.0]),
    )
    def ask(self, name: str, units: int, tier: Tier, wait_s: float) -> None:
        client = self.clients[name]
        self.ask_ids += 1
        client.waits[self.ask_ids] = Ask("gpu0", Modality.LLM, tier, units, wait_s)
        if client.connected:
            ask = client.waits[self.ask_ids]
            self.deliver(self.desk.session_ask(name, self.ask_ids, self.ticket(), ask, self.now))

    @precondition(lambda self: any(client.holds or client.waits for client in self.clients.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        asks = [(name, i) for name, client in self.clients.items() for i in [*client.holds, *client.waits]]
        name, ask_id = data.draw(st.sampled_from(sorted(asks)))
        client = self.clients[name]
        client.holds.pop(ask_id, None)
        client.waits.pop(ask_id, None)
        if client.connected:
            self.deliver(self.desk.session_release(name, ask_id, self.now))

    # ---- what time and fate do ------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        lost = [one for one in self.desk.sessions.by_id.values() if one.state is SessionState.LOST]
        if any(one.due is not None and one.due <= self.now for one in lost):
            self.overdraft_possible = True
        if self.desk.missing and seconds >= 0.5:
            self.overdraft_possible = True
        self.deliver(self.desk.advance(self.now))

    @rule()
    def admission_restarts(self) -> None:
        for client in self.clients.values():
            client.connected = False
        self.desk = self.new_desk(self.desk.memory())

    # ---- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def what_connected_services_hold_is_counted_exactly(self) -> None:
        sessions = self.desk.sessions.by_id
        for name, client in self.clients.items():
            if client.connected:
                mine = {i for i, ticket in sessions[name].tickets.items() if self.desk.scheduler.is_holding(ticket)}
                assert mine == set(client.holds)

    @invariant()
    def in_use_is_the_sum_of_what_sessions_hold(self) -> None:
        scheduler = self.desk.scheduler
        tickets = [t for one in self.desk.sessions.by_id.values() for t in one.tickets.values()]
        pool = view(scheduler, self.now)[0]
        assert pool.permits == sum(scheduler.is_holding(ticket) for ticket in tickets)
        assert pool.permits + pool.waiting == len(tickets)

    @invariant()
    def slots_are_exceeded_only_by_work_whose_time_to_come_back_was_over(self) -> None:
        if not self.overdraft_possible:
            assert view(self.desk.scheduler, self.now)[0].in_use <= SLOTS

    @invariant()
    def every_absent_session_is_waited_for_at_most_its_time(self) -> None:
        due = self.desk.next_due()
        for session in self.desk.sessions.timed():
            assert session.due is not None
            assert due is not None
            assert self.now < session.due <= self.now + GRACE_S
        if self.desk.missing:
            assert due is not None
            assert due <= self.now + SETTLE_S


TestSessions = DeskMachine.TestCase
TestSessions.settings = settings(max_examples=amount(40, thorough=100), stateful_step_count=60, deadline=None)
