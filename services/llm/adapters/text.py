"""The text host as the service sees it: calls with answers, a bound on each, and a fresh host after one that hangs."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from services.kit import telemetry
from services.kit.errors import DomainError, Reason
from services.kit.hosts.core.messages import LoadFailed
from services.kit.hosts.process import HostProcess
from services.llm.core.prompt import TemplateInputs
from services.llm.core.wire import (
    PROGRAM,
    CheckGrammar,
    FromText,
    GrammarChecked,
    Infill,
    Pieces,
    Refused,
    Render,
    Spelled,
    TextConfig,
    TextReady,
    Tokenize,
    Tokenized,
    pack_tokens,
    unpack_tokens,
)

Call = Render | Tokenize | Infill | Pieces | CheckGrammar
Answer = Tokenized | Spelled | GrammarChecked

GRACE_S: Final = 10.0
"""Enough to tokenize the longest prompt."""
_RESTART_S: Final = 1.0
_log = telemetry.logger(__name__)
A = TypeVar("A", Tokenized, Spelled, GrammarChecked)


@dataclass(frozen=True, slots=True)
class Text:
    """A tokenized prompt, and the text that was tokenized."""

    tokens: npt.NDArray[np.int32]
    prompt: str


@dataclass(slots=True)
class _Open:
    call: Call
    answer: asyncio.Future[Answer]


class TextHost:
    """Supervises one text host. `grace_s`: what a call may take beyond the template's own bound, seconds."""

    def __init__(self, config: TextConfig, *, environ: Mapping[str, str], grace_s: float = GRACE_S) -> None:
        self._config = config
        self._environ = environ
        self._grace_s = grace_s
        self._host: HostProcess[FromText] | None = None
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._sent: list[int] = []  # unanswered, in the order of asking, which is the order of answering
        self._ready: TextReady | None = None
        self._changed = asyncio.Event()
        self._failure = ""

    @property
    def known(self) -> TextReady | None:
        """What is known about the vocabulary without waiting."""
        return self._ready

    async def vocabulary(self, *, wait_s: float) -> TextReady:
        """Return what is known about the vocabulary. Raises DomainError `loading` when it is not there in time."""
        try:
            async with asyncio.timeout(wait_s):
                while self._ready is None:
                    await self._changed.wait()
        except TimeoutError:
            why = f": {self._failure}" if self._failure else ""
            raise DomainError(
                Reason.LOADING, f"the vocabulary was not loaded within {wait_s:g} s{why}", retry_after_ms=2_000
            ) from None
        return self._ready

    async def render(self, inputs: TemplateInputs, *, tools: list[dict[str, object]] | None, now_unix_s: float) -> Text:
        """Format a chat by the model's template. Raises DomainError `invalid_request` when it does not accept the chat."""
        answer = await self._ask(
            lambda call: Render(
                call, inputs.messages, tools, inputs.variables, inputs.prefill, now_unix_s, inputs.thinking
            ),
            Tokenized,
        )
        return Text(unpack_tokens(answer.tokens), answer.prompt)

    async def tokenize(self, text: str, *, begin: bool, parse_special: bool, whole: bool = False) -> Text:
        """Tokenize a text; `begin`: with the start token in front, where the model has one; `whole`: with all that it wants."""
        answer = await self._ask(lambda call: Tokenize(call, text, begin, parse_special, whole), Tokenized)
        return Text(unpack_tokens(answer.tokens), answer.prompt)

    async def infill(self, before: str, after: str) -> Text:
        """Tokenize a text with a gap. Raises DomainError `unsupported` when the model has no tokens for it."""
        answer = await self._ask(lambda call: Infill(call, before, after), Tokenized)
        return Text(unpack_tokens(answer.tokens), answer.prompt)

    async def pieces(self, tokens: npt.NDArray[np.int32]) -> list[bytes]:
        """Return the bytes of tokens, which must be in the vocabulary."""
        return (await self._ask(lambda call: Pieces(call, pack_tokens(tokens)), Spelled)).pieces

    async def check_grammar(self, grammar: str, field: str) -> None:
        """Let llama.cpp read a grammar. Raises DomainError `invalid_request` naming the field when it does not accept it."""
        await self._ask(lambda call: CheckGrammar(call, grammar, field), GrammarChecked)

    async def _ask(self, build: Callable[[int], Call], kind: type[A]) -> A:
        number = next(self._numbers)
        entry = _Open(build(number), asyncio.get_running_loop().create_future())
        self._open[number] = entry
        try:
            if self._ready is not None:
                self._send(entry.call)
            answer = await entry.answer
        finally:
            self._open.pop(number, None)
        if not isinstance(answer, kind):
            raise TypeError(f"{type(answer).__name__} answers no {type(entry.call).__name__}")
        return answer

    def _send(self, call: Call) -> None:
        if self._host is not None:
            self._sent.append(call.call)
            self._host.send(call)

    # ---- the host ---------------------------------------------------------------------------------------------

    async def supervise(self) -> None:
        """Keep a host running until cancelled."""
        while True:
            host = await HostProcess[FromText].start(PROGRAM, "text", FromText, self._hear, environ=self._environ)
            self._host = host
            try:
                host.send(self._config)
                why = await self._watch(host)
            finally:
                self._host, self._ready = None, None
                await host.stop()
            _log.error("text host died", why=why, calls=len(self._open))
            self._blame(why)
            await asyncio.sleep(_RESTART_S if self._failure else 0)

    async def _watch(self, host: HostProcess[FromText]) -> str:
        limit_s = self._config.render_s + self._grace_s
        while True:
            oldest = self._sent[:1]
            try:
                async with asyncio.timeout(limit_s):
                    await host.wait_closed()
            except TimeoutError:
                if oldest and self._sent[:1] == oldest:
                    host.kill()
                    await host.ended()
                    return f"a call took longer than {limit_s:g} s"
            else:
                return await host.ended()

    def _blame(self, why: str) -> None:
        """Fail the call that the host was at when it died; the others are asked again when a new host is there."""
        culprit = self._open.get(self._sent[0]) if self._sent else None
        self._sent.clear()
        if culprit is not None and not culprit.answer.done():
            field = culprit.call.field if isinstance(culprit.call, CheckGrammar) else "messages"
            message = f"'{field}' could not be processed: {why}"
            culprit.answer.set_exception(DomainError(Reason.INVALID_REQUEST, message, field=field))

    def _hear(self, message: FromText) -> None:
        if isinstance(message, TextReady):
            self._ready, self._failure = message, ""
            self._changed.set()
            self._changed = asyncio.Event()
            for waiting in self._open.values():
                if not waiting.answer.done():
                    self._send(waiting.call)
            return
        if isinstance(message, LoadFailed):
            self._failure = message.message
            return
        self._sent.remove(message.call)
        entry = self._open.get(message.call)
        if entry is None or entry.answer.done():
            return
        if isinstance(message, Refused):
            entry.answer.set_exception(DomainError(Reason(message.reason), message.message, field=message.field))
        else:
            entry.answer.set_result(message)
