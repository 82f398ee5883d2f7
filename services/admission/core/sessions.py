"""Sessions of engine services: what each holds and awaits, and what becomes of it when its stream is lost.

A lost session keeps its permits for a grace, since its process may well live and use the device. Its waiting asks
keep their place but cannot be granted: nobody would hear of it.
"""

from dataclasses import dataclass, field
from enum import IntEnum, auto


class SessionState(IntEnum):
    """Where a session stands."""

    OPEN = auto()
    LOST = auto()
    GONE = auto()


class SessionMove(IntEnum):
    """What can happen to a session."""

    LOSE = auto()
    RESUME = auto()
    END = auto()


MOVES: dict[tuple[SessionState, SessionMove], SessionState] = {
    (SessionState.OPEN, SessionMove.LOSE): SessionState.LOST,
    (SessionState.OPEN, SessionMove.END): SessionState.GONE,
    (SessionState.LOST, SessionMove.RESUME): SessionState.OPEN,
    (SessionState.LOST, SessionMove.END): SessionState.GONE,
}


class SessionConflictError(Exception):
    """The session is open on another stream."""


class DuplicateAskError(Exception):
    """The session has a live ask with this id."""


@dataclass(slots=True)
class Session:
    """One engine service's session.

    `tickets`: its live asks by ask id. `unclaimed`: waiting asks from before a loss that were not asked again yet.
    `due`: when the grace of a loss, or of the claims after it, ends.
    """

    session_id: str
    service: str
    state: SessionState = SessionState.OPEN
    tickets: dict[int, int] = field(default_factory=dict)
    unclaimed: set[int] = field(default_factory=set)
    due: float | None = None

    def move(self, move: SessionMove) -> None:
        """Change the state. Raises SessionConflictError for what the table does not have."""
        try:
            self.state = MOVES[self.state, move]
        except KeyError:
            raise SessionConflictError(f"session {self.session_id!r} is {self.state.name.lower()}") from None


class Sessions:
    """All sessions that are open or lost, and which ask each ticket of theirs belongs to."""

    def __init__(self) -> None:
        self.by_id: dict[str, Session] = {}
        self._owners: dict[int, tuple[Session, int]] = {}
        self._timed: set[str] = set()

    def open(self, session_id: str, service: str) -> Session:
        """Open a new session or resume a lost one. Raises SessionConflictError for one that is open or another's."""
        session = self.by_id.get(session_id)
        if session is None:
            session = self.by_id[session_id] = Session(session_id, service)
        elif session.service != service:
            raise SessionConflictError(f"session {session_id!r} belongs to {session.service}, not to {service}")
        else:
            session.move(SessionMove.RESUME)
        return session

    def lose(self, session: Session, due: float) -> None:
        """Note that the stream broke; the grace ends at `due`."""
        session.move(SessionMove.LOSE)
        self.set_due(session, due)

    def end(self, session: Session) -> list[int]:
        """Forget the session; return the tickets to give back."""
        session.move(SessionMove.END)
        self.set_due(session, None)
        del self.by_id[session.session_id]
        tickets = list(session.tickets.values())
        for ticket in tickets:
            del self._owners[ticket]
        return tickets

    def add(self, session: Session, ask_id: int, ticket: int) -> None:
        """Enter a new ask. Raises DuplicateAskError."""
        if ask_id in session.tickets:
            raise DuplicateAskError(f"ask {ask_id} of session {session.session_id!r} is live already")
        session.tickets[ask_id] = ticket
        self._owners[ticket] = (session, ask_id)

    def remove(self, ticket: int) -> None:
        """Forget an ask that is over; a ticket of no session is no error."""
        owner = self._owners.pop(ticket, None)
        if owner is not None:
            session, ask_id = owner
            del session.tickets[ask_id]
            session.unclaimed.discard(ticket)

    def owner(self, ticket: int) -> tuple[Session, int] | None:
        """Return the session and ask id of a ticket, or None when it belongs to no session."""
        return self._owners.get(ticket)

    def set_due(self, session: Session, due: float | None) -> None:
        """Set or clear the session's timer."""
        session.due = due
        if due is None:
            self._timed.discard(session.session_id)
        else:
            self._timed.add(session.session_id)

    def timed(self) -> list[Session]:
        """Return the sessions with a timer running."""
        return [self.by_id[session_id] for session_id in self._timed]
