"""From the engine's deltas to what the caller is told: text, thoughts and calls apart, with their tokens counted."""

from collections.abc import Callable

import msgspec

from services.llm.core.answer import Called, Part, Said, Splitter, State, Thought
from services.llm.core.dialect import Dialect
from services.llm.core.wire import Delta, Logprob


class CallPiece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a call; `identity` and `name` only in its first one."""

    index: int
    identity: str
    name: str
    arguments: str


class Shaped(Delta, frozen=True, array_like=True):
    """A delta taken apart: `text` is what is said."""

    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


class Shaper:
    """Takes the choices of one request apart. `new_id` makes the identity of a call."""

    def __init__(self, dialect: Dialect, *, inside: bool, tools: bool, new_id: Callable[[], str]) -> None:
        self._dialect = dialect
        self._inside = inside
        self._tools = dialect.format if tools else None
        self._new_id = new_id
        self._choices: dict[int, Splitter] = {}
        self._held: dict[int, list[Logprob]] = {}
        self.reasoning_tokens = 0

    def shaped(self, delta: Delta) -> Shaped:
        """Return a delta taken apart; the end of a choice that made calls says so."""
        splitter = self._choices.get(delta.choice)
        if splitter is None:
            splitter = self._choices[delta.choice] = Splitter(
                self._dialect.thinking, inside=self._inside, tools=self._tools
            )
        parts: list[Part] = []
        logprobs: list[Logprob] = []
        held = self._held.setdefault(delta.choice, [])  # of tokens that may still turn out to be a mark
        at = 0
        for place, size in enumerate(delta.sizes):
            before = splitter.state
            parts += splitter.push(delta.text[at : at + size])
            at += size
            states = {before, splitter.state}
            self.reasoning_tokens += State.THINKING in states
            if states != {State.SAYING}:
                held.clear()
            elif delta.logprobs:
                held.append(delta.logprobs[place])
                if not splitter.holds:
                    logprobs += held
                    held.clear()
        finish = delta.finish
        if finish is not None:
            parts += splitter.end()
            logprobs += held
            if finish.reason == "stop" and splitter.calls and splitter.state is not State.CALLING:
                finish = msgspec.structs.replace(finish, reason="tool_calls")
        return Shaped(
            request=delta.request,
            choice=delta.choice,
            text="".join(part.text for part in parts if isinstance(part, Said)),
            tokens=delta.tokens,
            finish=finish,
            logprobs=tuple(logprobs),
            reasoning="".join(part.text for part in parts if isinstance(part, Thought)),
            calls=tuple(self._piece(part) for part in parts if isinstance(part, Called)),
        )

    def _piece(self, part: Called) -> CallPiece:
        return CallPiece(part.index, self._new_id() if part.name else "", part.name, part.arguments)
