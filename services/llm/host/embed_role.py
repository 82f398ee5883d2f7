"""The embedding host: one thread tokenizes what comes in, the other computes."""

import threading
from collections import deque
from typing import Final

import numpy as np

from services.kit.hosts.core.framing import Frames
from services.kit.hosts.core.messages import LoadFailed
from services.kit.hosts.pipe import Pipe
from services.kit.hosts.serving import compute_and_listen, first
from services.llm.core.embed_plan import StepRoom
from services.llm.core.embed_wire import (
    Ask,
    Computed,
    Drop,
    EmbedConfig,
    EmbedReady,
    Item,
    Prepare,
    Prepared,
    Start,
    ToEmbedder,
    Unfit,
)
from services.llm.core.embedding import cut_to, pair_tokens
from services.llm.core.placement import Placed, PlacementError
from services.llm.core.wire import unpack_tokens
from services.llm.host.context import Tokens
from services.llm.host.embed_context import EmbedContext, warm_up
from services.llm.host.embed_engine import EmbedEngine, Job
from services.llm.host.llama import LlamaError, Model, gpus, stop_listening
from services.llm.host.loading import load_model

_MOST_SEQUENCES: Final = 128
_MOST_PLAIN_TOKENS: Final = 2048
"""Attention over so many tokens at once takes 16 MiB for each head; above, flash attention does without."""


def serve_embed(pipe: Pipe) -> None:
    """Serve until the service closes the pipe; exit status 0 after a failed load that was reported."""
    frames: Frames[ToEmbedder] = Frames(ToEmbedder)
    config = first(pipe, frames, EmbedConfig)
    line = _Line(pipe)
    try:
        model, placed = load_model(
            pipe,
            config.path,
            layers=config.layers,
            gpu_layers=config.gpu_layers,
            keep_free_mib=config.keep_free_mib,
            allow_cpu_fallback=config.allow_cpu_fallback,
        )
        room = max(config.input_tokens, config.batch_tokens)
        context = EmbedContext(
            model,
            tokens=room,
            sequences=min(_MOST_SEQUENCES, config.batch_tokens),
            threads=_threads(config),
            pooling=config.pooling,
            flash=placed.gpu_layers != 0 or room > _MOST_PLAIN_TOKENS,
        )
    except (LlamaError, PlacementError) as error:
        pipe.send(LoadFailed(str(error), permanent=isinstance(error, PlacementError)))
        return
    stop_listening()
    reader = Reader(model, config.input_tokens)
    warm_up(context, reader.tokens(Item("a"))[0])
    engine = EmbedEngine(context, StepRoom(config.batch_tokens, context.sequences), line.send)
    line.send(_ready(config, model, context, placed))
    commands = _Commands(reader, engine, line)
    compute_and_listen(engine.run, lambda: commands.listen(pipe, frames))


class _Line:
    """The way to the service, for two threads."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: EmbedReady | Prepared | Unfit | Computed) -> None:
        with self._lock:
            self._pipe.send(message)


class Reader:
    """Turns inputs into tokens. `limit`: most tokens of one."""

    def __init__(self, model: Model, limit: int) -> None:
        self._vocabulary = model.vocabulary
        self._template = model.template("rerank")
        self._ends = frozenset({self._vocabulary.eos, self._vocabulary.sep} - {-1})
        self.limit = limit

    def prepare(self, message: Prepare) -> Job | Unfit:
        """Return the job, or the first input that is empty or too long."""
        waiting: deque[Tokens] = deque()
        for place, item in enumerate(message.items):
            tokens = self.tokens(item)
            if len(tokens) > self.limit and message.truncate:
                tokens = cut_to(tokens, self.limit, ends=self._ends)
            if not 0 < len(tokens) <= self.limit:
                return Unfit(message.request, place, len(tokens), self.limit)
            waiting.append(tokens)
        return Job(message.request, waiting)

    def tokens(self, item: Item) -> Tokens:
        """Return the tokens of one input as the model wants them; given tokens are taken as they are."""
        if item.tokens is not None:
            return unpack_tokens(item.tokens)
        if item.query is None:
            return self._array(self._split(item.text, add_special=True, parse_special=True))
        if self._template is not None:
            filled = self._template.replace("{query}", item.query).replace("{document}", item.text)
            return self._array(self._split(filled, parse_special=True))
        ends = self._vocabulary.pair_ends()
        return self._array(pair_tokens(self._split(item.query), self._split(item.text), ends))

    def _split(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        data = text.encode("utf-8", "replace")
        return self._vocabulary.tokenize(data, parse_special=parse_special, add_special=add_special)

    @staticmethod
    def _array(tokens: list[int]) -> Tokens:
        return np.asarray(tokens, np.int32)


class _Commands:
    """What the service asks for, in its order."""

    def __init__(self, reader: Reader, engine: EmbedEngine, line: _Line) -> None:
        self._reader = reader
        self._engine = engine
        self._line = line
        self._prepared: dict[int, Job] = {}

    def listen(self, pipe: Pipe, frames: Frames[ToEmbedder]) -> None:
        """Obey for ever."""
        while True:
            for message in frames.feed(pipe.receive()):
                self._obey(message)

    def _obey(self, message: ToEmbedder) -> None:
        if isinstance(message, Prepare):
            found = self._reader.prepare(message)
            if isinstance(found, Unfit):
                self._line.send(found)
                return
            self._prepared[message.request] = found
            self._line.send(Prepared(message.request, sum(found.lengths)))
        elif isinstance(message, Start):
            self._engine.tell(self._prepared.pop(message.request))
        elif isinstance(message, Drop):
            if self._prepared.pop(message.request, None) is None:
                self._engine.drop(message.request)
        elif isinstance(message, Ask):
            self._engine.ask()
        else:
            raise TypeError("a second configuration")


def _threads(config: EmbedConfig) -> int:
    """Return the threads to compute with: two engines that spin on the same cores would stop each other."""
    if config.threads:
        return config.threads
    return 1 if config.shares_cores or not gpus() else config.cores


def _ready(config: EmbedConfig, model: Model, context: EmbedContext, placed: Placed) -> EmbedReady:
    return EmbedReady(
        width=context.width,
        vocabulary=model.vocabulary.size,
        input_tokens=config.input_tokens,
        batch_tokens=config.batch_tokens,
        sequences=context.sequences,
        threads=context.threads,
        device=placed.device,
        gpu_layers=model.layers + 1 if placed.gpu_layers < 0 else placed.gpu_layers,
        degraded=placed.degraded,
        reason=placed.reason,
        flash_attention=context.flash_attention,
    )
