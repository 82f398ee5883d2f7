"""The text host: vocabulary and chat template without weights, apart from the engine.

Apart, because rendering and tokenizing must not take the interpreter from the engine thread, answers while the engine is
dead or busy, and may be killed when a template hangs. One thread, one call at a time, in order.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from services.kit.hosts.core.framing import Frames
from services.kit.hosts.core.messages import LoadFailed
from services.kit.hosts.pipe import Pipe
from services.llm.core.dialect import dialect_of, settled
from services.llm.core.wire import (
    CheckGrammar,
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
    ToText,
    pack_tokens,
    unpack_tokens,
)
from services.llm.host.grammar import Alphabet, Grammar, GrammarError
from services.llm.host.llama import LlamaError, Model, start_backend, stop_listening
from services.llm.host.template import CHATML, ChatTemplate, TemplateError, template_variables

_MIB: Final = 1024 * 1024
_PR_SET_PDEATHSIG: Final = 1


def serve_text(pipe: Pipe) -> None:
    """Serve until the service closes the pipe."""
    # A template that hangs in C code would not notice the closed pipe.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    frames: Frames[ToText] = Frames(ToText)
    text: Text | None = None
    while True:
        for message in frames.feed(pipe.receive()):
            if isinstance(message, TextConfig):
                try:
                    text = Text(message)
                except (LlamaError, TemplateError) as error:
                    pipe.send(LoadFailed(str(error)))
                    return
                pipe.send(text.ready())
            elif text is None:
                raise TypeError(f"{type(message).__name__} before the configuration")
            else:
                pipe.send(text.answer(message))


class Text:
    """A model's vocabulary and template."""

    def __init__(self, config: TextConfig) -> None:
        start_backend()
        self._model = Model.load(config.path, vocabulary_only=True)
        stop_listening()
        self._vocabulary = self._model.vocabulary
        source = config.template or self._model.template()
        self._own_template = source is not None
        self._source = source or CHATML
        self._infill = self._vocabulary.infill()
        self._alphabet: Alphabet | None = None
        self._config = config
        limit = config.memory_mib * _MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._template = ChatTemplate(
            self._source,
            bos=self._spell(self._vocabulary.bos),
            eos=self._spell(self._vocabulary.eos),
            render_s=config.render_s,
            most_bytes=config.prompt_bytes,
        )

    def ready(self) -> TextReady:
        """Return what the service wants to know about the vocabulary."""
        return TextReady(
            vocabulary=self._vocabulary.size,
            context_tokens=self._model.context_tokens,
            own_template=self._own_template,
            end_tokens=self._vocabulary.ends(),
            template=self._source,
            infill=self._infill is not None,
        )

    def answer(
        self, call: Render | Tokenize | Infill | Pieces | CheckGrammar
    ) -> Tokenized | Spelled | GrammarChecked | Refused:
        """Return the answer to a call."""
        if isinstance(call, CheckGrammar):
            return self._checked(call)
        if isinstance(call, Pieces):
            tokens = unpack_tokens(call.tokens).tolist()
            return Spelled(call.call, [self._vocabulary.piece(token, special=True) for token in tokens])
        if isinstance(call, Infill):
            return self._with_gap(call)
        if isinstance(call, Tokenize):
            return self._tokenized(
                call.call, call.text, begin=call.begin, parse_special=call.parse_special, whole=call.whole
            )
        try:
            prompt = self._render(call)
        except TemplateError as error:
            return Refused(call.call, "invalid_request", str(error), "messages")
        return self._tokenized(call.call, prompt, begin=True, parse_special=True)

    def _checked(self, call: CheckGrammar) -> GrammarChecked | Refused:
        """Let llama.cpp read a grammar and say what may come first. A grammar that hangs it ends this process."""
        alphabet = self._alphabet = self._alphabet or Alphabet(self._vocabulary, self._vocabulary.ends())
        try:
            with _deadline(self._config.render_s), _complaints() as complaints:
                grammar = Grammar(self._vocabulary, call.grammar)
                allowed = grammar.allowed(alphabet.singles).any() or grammar.allowed(alphabet.ends).any()
                grammar.close()
        except LlamaError:
            why = complaints() or "it is not well formed, or a rule begins with itself"
            return Refused(call.call, "invalid_request", f"'{call.field}' is no grammar: {why}", call.field)
        except GrammarError as error:
            return Refused(call.call, "invalid_request", f"'{call.field}': {error}", call.field)
        if not allowed:
            return Refused(call.call, "invalid_request", f"'{call.field}' allows no text at all", call.field)
        return GrammarChecked(call.call)

    def _render(self, call: Render) -> str:
        variables = template_variables(call.variables)
        prompt = self._template.render(
            now_unix_s=call.now_unix_s,
            messages=call.messages,
            tools=call.tools,
            add_generation_prompt=True,
            **variables,
        )
        return settled(prompt, dialect_of(self._source).thinking, wanted=call.thinking, prefill=call.prefill)

    def _with_gap(self, call: Infill) -> Tokenized | Refused:
        """Return the tokens of a text with a gap: its beginning, its end, then what the model continues."""
        if self._infill is None:
            return Refused(
                call.call, "unsupported", "'suffix': this model has no tokens for texts with a gap", "suffix"
            )
        beginning, end, gap = self._infill
        before, after = (
            self._vocabulary.tokenize(text.encode("utf-8", "replace"), parse_special=False)
            for text in (call.before, call.after)
        )
        start = [self._vocabulary.bos] if self._vocabulary.adds_bos else []
        return Tokenized(call.call, pack_tokens([*start, beginning, *before, end, *after, gap]), call.before)

    def _tokenized(self, call: int, text: str, *, begin: bool, parse_special: bool, whole: bool = False) -> Tokenized:
        data = text.encode("utf-8", "replace")
        tokens = self._vocabulary.tokenize(data, parse_special=parse_special, add_special=whole)
        bos = self._vocabulary.bos
        # Templates often write the start token themselves; twice would change the answer.
        if begin and not whole and self._vocabulary.adds_bos and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
        return Tokenized(call, pack_tokens(tokens), text)

    def _spell(self, token: int) -> str:
        return self._vocabulary.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """End the process when the block takes more processor time: nothing else stops C code. The service sees which call it was."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def _complaints() -> Iterator[Callable[[], str]]:
    """Catch what C code writes to stderr; gives what returns its first line, after the block."""
    caught = os.memfd_create("complaints")
    former = os.dup(2)
    os.dup2(caught, 2)
    text = b""

    def first_line() -> str:
        lines = text.decode("utf-8", "replace").strip().splitlines()
        return lines[0].removeprefix("parse: ").removeprefix("error parsing grammar: ")[:200] if lines else ""

    try:
        yield first_line
    finally:
        os.dup2(former, 2)
        text = os.pread(caught, 4096, 0)
        os.close(former)
        os.close(caught)
