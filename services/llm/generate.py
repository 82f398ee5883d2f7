"""One generation from request to usage: check, tokenize, wait for the permit, run, give everything back."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from omniserve.llm.v1 import llm_pb2 as pb
from services.kit.clock import Clock
from services.kit.errors import DomainError, Reason
from services.kit.hosts.hosting import TIER_RANKS
from services.kit.hosts.residents import Asker, ReplacedError
from services.llm.adapters.engine import Announcement
from services.llm.adapters.text import Text
from services.llm.core.adapters import AdapterSet, adapter_set
from services.llm.core.catalogue import Kind
from services.llm.core.dialect import dialect_of
from services.llm.core.history import cut, cuts, first_fit, room_wanted
from services.llm.core.options import AskedOptions, Options, check_options, check_tokens, fit_context
from services.llm.core.prompt import Chat, Completion, template_inputs
from services.llm.core.shaping import Shaper
from services.llm.core.tools import described, told
from services.llm.core.wire import Delta, Finish, Limits, Logprob, Progress, Reading, Submit, TextReady, pack_tokens
from services.llm.forms import Form, Forms
from services.llm.outbox import Port
from services.llm.resident import Resident
from services.llm.residents import Residents
from services.llm.spans import Timeline, generation_span


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
    """Runs generations of the models that generate text."""

    def __init__(self, residents: Residents, clock: Clock, waits: Waits) -> None:
        self.residents = residents
        self.draining = False
        self._clock = clock
        self._waits = waits
        self._forms = Forms()

    async def run(self, work: Work, port: Port) -> None:
        """Run one generation to its end; the last thing said is `done`.

        However it is left, the sequence and the permit are given back. Raises DomainError.
        """
        if self.draining:
            raise DomainError(Reason.DRAINING, "the service is stopping", retry_after_ms=5_000)
        while True:
            resident = self.residents.find(work.model, Kind.CHAT)
            port.model = resident.name
            try:
                with self.residents.visit(resident), resident.engine.announce() as announcement:
                    await self._run(work, resident, port, announcement)
            except ReplacedError:
                continue
            return

    async def _run(self, work: Work, resident: Resident, port: Port, announcement: Announcement) -> None:
        vocabulary = await self.vocabulary(resident)
        options = check_options(
            work.options,
            vocabulary=vocabulary.vocabulary,
            defaults=resident.served.sampling,
            speculates=resident.served.chat.speculation.draft > 0,
            least_tokens=0 if isinstance(work.content, Completion) else 1,
        )
        adapters = adapter_set(work.options.adapters, tuple(resident.served.chat.loras))
        prompt = await self._fitting(work.content, options, resident, vocabulary)
        # Before it waits for anything: nobody should queue for a model only to hear that the prompt is too long.
        limits = fit_context(options, prompt_tokens=len(prompt.tokens), context_tokens=resident.context_tokens)
        form = await self._forms.of(work.content, options.structure, prompt.prompt, resident, vocabulary)
        timeline = Timeline(self._clock)
        echo = await self._echo(work.content, resident, prompt, options.choices)
        watcher = _Watcher(port, timeline, form.shaper, echo)
        asker = Asker(work.tier, work.client, work.request_id, options.may_wait)

        def queued(position: int, eta_ms: int | None) -> None:
            announcement.withdraw()
            port.queued(position, eta_ms)

        def loading(progress: float | None) -> None:
            announcement.withdraw()
            port.loading(progress)

        with generation_span(resident.name, work.content, options, limits, timeline):
            async with self.residents.use(resident, asker, on_queued=queued, on_loading=loading):
                timeline.granted()
                limits = fit_context(options, prompt_tokens=len(prompt.tokens), context_tokens=resident.context_tokens)
                if options.logprobs < 0:
                    watcher.echo(())
                await self._generate(
                    work,
                    resident,
                    prompt,
                    watcher,
                    form,
                    announcement=announcement,
                    options=options,
                    limits=limits,
                    adapters=adapters,
                )
            timeline.ended(watcher.finishes)
        port.done(_usage(watcher.finishes, timeline, form.shaper))

    async def _fitting(
        self, content: Chat | Completion, options: Options, resident: Resident, vocabulary: TextReady
    ) -> Text:
        """Return what is to be continued, without the oldest turns if the caller wants that and not all fit."""
        prompt = await self.prompt(content, resident, vocabulary)
        if not isinstance(content, Chat) or not content.drop_oldest:
            return prompt
        most = resident.context_tokens - room_wanted(options.max_tokens, resident.context_tokens)
        places = cuts(content.turns)
        if len(prompt.tokens) <= most or not places:
            return prompt
        tried: dict[int, Text] = {}

        async def fits(place: int) -> bool:
            tried[place] = await self.prompt(replace(content, turns=cut(content.turns, place)), resident, vocabulary)
            return len(tried[place].tokens) <= most

        place = await first_fit(places, fits)
        if place not in tried:
            await fits(place)
        return tried[place]

    async def vocabulary(self, resident: Resident) -> TextReady:
        """Return what is known about a model's vocabulary. Raises DomainError `loading`."""
        return await resident.text.vocabulary(wait_s=self._waits.load_s)

    async def prompt(self, content: Chat | Completion, resident: Resident, vocabulary: TextReady) -> Text:
        """Return what is to be continued as tokens. Raises DomainError."""
        if isinstance(content, Chat):
            served = resident.served
            self.check_size("messages", sum(len(part) for turn in content.turns for part in turn.texts))
            dialect = dialect_of(vocabulary.template)
            tools = described(content.toolbox)
            heard = replace(content, turns=told(content.turns, tools, dialect))
            inputs = template_inputs(heard, developer_role=served.developer_role, system=served.system)
            native = tools if tools and dialect.native else None
            return await resident.text.render(inputs, tools=native, now_unix_s=self._clock.wall())
        if content.suffix is not None:
            self.check_size("suffix", len(content.suffix))
            self.check_size("prompt.text", len(content.text or ""))
            return await resident.text.infill(content.text or "", content.suffix)
        if content.tokens is not None:
            check_tokens("prompt.tokens.ids", list(content.tokens), vocabulary.vocabulary)
            return Text(np.asarray(content.tokens, np.int32), "")
        text = content.text or ""
        self.check_size("prompt.text", len(text))
        return await resident.text.tokenize(text, begin=True, parse_special=True)

    def check_size(self, path: str, size: int) -> None:
        """Raise DomainError `too_large` for a text that is too long to be tokenized."""
        if size > self._waits.prompt_bytes:
            message = f"'{path}' has {size} characters; the most is {self._waits.prompt_bytes}"
            raise DomainError(Reason.TOO_LARGE, message, field=path)

    async def _echo(self, content: Chat | Completion, resident: Resident, prompt: Text, choices: int) -> "_Echo | None":
        """Return what is said before the answers, if the caller wants to hear the prompt."""
        if not isinstance(content, Completion) or not content.echo:
            return None
        if content.text is not None:
            return _Echo(content.text, choices)
        pieces = await resident.text.pieces(prompt.tokens)
        return _Echo(b"".join(pieces).decode("utf-8", "replace"), choices)

    async def _generate(
        self,
        work: Work,
        resident: Resident,
        prompt: Text,
        watcher: "_Watcher",
        form: Form,
        *,
        announcement: Announcement,
        options: Options,
        limits: Limits,
        adapters: AdapterSet,
    ) -> None:
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
                adapters=adapters,
                constraint=form.constraint,
                shown=form.shown,
                sized=form.shaper is not None,
                speculate=options.speculate,
                tells_prompt=options.logprobs >= 0 and watcher.echoes,
            )

        ticket = resident.engine.submit(submit, watcher)
        announcement.withdraw()
        try:
            await ticket.ended
        finally:
            resident.engine.cancel(ticket)


@dataclass(frozen=True, slots=True)
class _Echo:
    """The prompt as it is told before each of so many answers."""

    text: str
    choices: int


class _Watcher:
    """The engine's sink: passes on, and notes when and how much. `echo`: the prompt, if it is to be told."""

    def __init__(self, port: Port, timeline: Timeline, shaper: Shaper | None, echo: _Echo | None) -> None:
        self._port = port
        self._timeline = timeline
        self._shaper = shaper
        self._echo = echo
        self.finishes: list[Finish] = []

    @property
    def echoes(self) -> bool:
        return self._echo is not None

    def echo(self, logprobs: tuple[Logprob, ...]) -> None:
        """Say the prompt first, if it is to be said."""
        if self._echo is not None:
            for choice in range(self._echo.choices):
                self._port.delta(Delta(request=0, choice=choice, text=self._echo.text, tokens=0, logprobs=logprobs))

    def progress(self, progress: Progress) -> None:
        self._port.progress(progress)

    def reading(self, reading: Reading) -> None:
        first, *others = reading.logprobs
        if self._echo is not None and not self._echo.text.encode().startswith(first.piece):
            first = msgspec.structs.replace(first, piece=b"")  # a start token, which is no part of the text
        self.echo((first, *others))

    def delta(self, delta: Delta) -> None:
        self._timeline.gained()
        if delta.finish is not None:
            self.finishes.append(delta.finish)
        self._port.delta(delta if self._shaper is None else self._shaper.shaped(delta))


def _usage(finishes: list[Finish], timeline: Timeline, shaper: Shaper | None) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=finishes[0].prompt_tokens,
        # What later choices share with the first one is no saving: it was computed for this request.
        cached_tokens=min(finish.cached_tokens for finish in finishes),
        completion_tokens=sum(finish.completion_tokens for finish in finishes),
        reasoning_tokens=0 if shaper is None else shaper.reasoning_tokens,
        queue_ms=timeline.queue_ms,
        prefill_ms=timeline.prefill_ms,
        decode_ms=timeline.decode_ms,
        drafted_tokens=sum(finish.drafted_tokens for finish in finishes),
        accepted_tokens=sum(finish.accepted_tokens for finish in finishes),
    )
