"""One generation from request to usage: check, tokenize, wait for the permit, run, give everything back."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from omniserve.llm.v1 import llm_pb2 as pb
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.llm.adapters.engine import Engine
from services.llm.adapters.text import Text, TextHost
from services.llm.core.catalogue import Entry, check_name
from services.llm.core.options import AskedOptions, Options, check_options, check_tokens, fit_context
from services.llm.core.prompt import Chat, Completion, template_inputs
from services.llm.core.wire import Delta, Finish, Limits, Progress, Sampling, Submit, TextReady, pack_tokens
from services.llm.outbox import Port
from services.llm.spans import Timeline, generation_span

TIER_RANKS = {"background": 0, "free": 1, "sub": 2, "paid": 3}


class Permits(Protocol):
    """Where permits come from: kit's PermitClient."""

    def permit(
        self,
        *,
        modality: str,
        tier: str,
        principal: str,
        request_id: str,
        may_wait: bool,
        on_queued: Callable[[int, int | None], None],
    ) -> AbstractAsyncContextManager[object]:
        """Wait for a permit and hold it for the length of the block. Raises DomainError when there is none."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked for, by whom."""

    model: str
    content: Chat | Completion
    options: AskedOptions
    client: str
    tier: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Waits:
    """`load_s`: for a model that is loading. `prompt_bytes`: longest text."""

    load_s: float
    prompt_bytes: int


class Generator:
    """Runs generations of one model."""

    def __init__(
        self,
        *,
        entry: Entry,
        engine: Engine,
        text: TextHost,
        permits: Permits,
        clock: Clock,
        defaults: Sampling,
        developer_role: bool,
        system: str | None,
        waits: Waits,
    ) -> None:
        self.entry = entry
        self.engine = engine
        self.text = text
        self.draining = False
        self._permits = permits
        self._clock = clock
        self._defaults = defaults
        self._developer_role = developer_role
        self._system = system
        self._waits = waits

    async def run(self, work: Work, port: Port) -> None:
        """Run one generation to its end; the last thing said is `done`.

        However it is left, the sequence and the permit are given back. Raises DomainError.
        """
        if self.draining:
            raise DomainError(Reason.DRAINING, "the service is stopping", retry_after_ms=5_000)
        check_name(work.model, self.entry)
        vocabulary = await self.text.vocabulary(wait_s=self._waits.load_s)
        options = check_options(work.options, vocabulary=vocabulary.vocabulary, defaults=self._defaults)
        prompt = await self.prompt(work.content, vocabulary)
        ready = await self.engine.ready(wait_s=self._waits.load_s, on_loading=port.loading)
        limits = fit_context(options, prompt_tokens=len(prompt.tokens), context_tokens=ready.context_tokens)
        timeline = Timeline(self._clock)
        watcher = _Watcher(port, timeline)
        with generation_span(self.entry.name, work.content, options, limits, timeline):
            async with self._permits.permit(
                modality="llm",
                tier=work.tier,
                principal=work.client,
                request_id=work.request_id,
                may_wait=options.may_wait,
                on_queued=port.queued,
            ):
                timeline.granted()
                # The engine may have died while the request waited for its turn.
                await self.engine.ready(wait_s=self._waits.load_s, on_loading=port.loading)
                if isinstance(work.content, Completion) and work.content.echo:
                    await self._echo(work.content, prompt, options.choices, port)
                await self._generate(work, options, limits, prompt, watcher)
            timeline.ended(watcher.finishes)
        port.done(_usage(watcher.finishes, timeline))

    async def prompt(self, content: Chat | Completion, vocabulary: TextReady) -> Text:
        """Return what is to be continued as tokens. Raises DomainError."""
        if isinstance(content, Chat):
            inputs = template_inputs(content, developer_role=self._developer_role, system=self._system)
            self.check_size("messages", sum(len(part) for turn in content.turns for part in turn.texts))
            return await self.text.render(inputs, tools=None, now_unix_s=self._clock.wall())
        if content.tokens is not None:
            check_tokens("prompt.tokens.ids", list(content.tokens), vocabulary.vocabulary)
            return Text(np.asarray(content.tokens, np.int32), "")
        text = content.text or ""
        self.check_size("prompt.text", len(text))
        return await self.text.tokenize(text, begin=True, parse_special=True)

    def check_size(self, path: str, size: int) -> None:
        """Raise DomainError `too_large` for a text that is too long to be tokenized."""
        if size > self._waits.prompt_bytes:
            message = f"'{path}' has {size} characters; the most is {self._waits.prompt_bytes}"
            raise DomainError(Reason.TOO_LARGE, message, field=path)

    async def _echo(self, content: Completion, prompt: Text, choices: int, port: Port) -> None:
        text = content.text
        if text is None:
            text = b"".join(await self.text.pieces(prompt.tokens)).decode("utf-8", "replace")
        for choice in range(choices):
            port.delta(Delta(request=0, choice=choice, text=text, tokens=0))

    async def _generate(self, work: Work, options: Options, limits: Limits, prompt: Text, watcher: "_Watcher") -> None:
        tokens = pack_tokens(prompt.tokens)

        def submit(request: int) -> Submit:
            return Submit(
                request=request,
                prompt=tokens,
                sampling=options.sampling,
                limits=limits,
                choices=options.choices,
                logprobs=options.logprobs,
                reuse=options.reuse,
                rank=TIER_RANKS.get(work.tier, 1),
            )

        ticket = self.engine.submit(submit, watcher)
        try:
            await ticket.ended
        finally:
            self.engine.cancel(ticket)


class _Watcher:
    """The engine's sink: passes on, and notes when and how much."""

    def __init__(self, port: Port, timeline: Timeline) -> None:
        self._port = port
        self._timeline = timeline
        self.finishes: list[Finish] = []

    def progress(self, progress: Progress) -> None:
        self._port.progress(progress)

    def delta(self, delta: Delta) -> None:
        self._timeline.gained()
        if delta.finish is not None:
            self.finishes.append(delta.finish)
        self._port.delta(delta)


def _usage(finishes: list[Finish], timeline: Timeline) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=finishes[0].prompt_tokens,
        # What later choices share with the first one is no saving: it was computed for this request.
        cached_tokens=min(finish.cached_tokens for finish in finishes),
        completion_tokens=sum(finish.completion_tokens for finish in finishes),
        queue_ms=timeline.queue_ms,
        prefill_ms=timeline.prefill_ms,
        decode_ms=timeline.decode_ms,
    )
