"""The text host: vocabulary and chat template without weights, apart from the engine.

Apart, because rendering and tokenizing must not take the interpreter from the engine thread, answers while the engine is
dead or busy, and may be killed when a template hangs. One thread, one call at a time, in order.
"""

import ctypes
import resource
import signal
from typing import Final

from services.llm.core.framing import Frames
from services.llm.core.wire import (
    LoadFailed,
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
from services.llm.host.llama import LlamaError, Model, start_backend, stop_listening
from services.llm.host.pipe import Pipe
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
        source = self._model.template()
        self._own_template = source is not None
        self._config = config
        limit = config.memory_mib * _MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        self._template = ChatTemplate(
            source or CHATML,
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
        )

    def answer(self, call: Render | Tokenize | Pieces) -> Tokenized | Spelled | Refused:
        """Return the answer to a call."""
        if isinstance(call, Pieces):
            tokens = unpack_tokens(call.tokens).tolist()
            return Spelled(call.call, [self._vocabulary.piece(token, special=True) for token in tokens])
        if isinstance(call, Tokenize):
            return self._tokenized(call.call, call.text, begin=call.begin, parse_special=call.parse_special)
        try:
            prompt = self._render(call)
        except TemplateError as error:
            return Refused(call.call, "invalid_request", str(error), "messages")
        return self._tokenized(call.call, prompt, begin=True, parse_special=True)

    def _render(self, call: Render) -> str:
        variables = template_variables(call.variables)
        prompt = self._template.render(
            now_unix_s=call.now_unix_s,
            messages=call.messages,
            tools=call.tools,
            add_generation_prompt=True,
            **variables,
        )
        return prompt + (call.prefill or "")

    def _tokenized(self, call: int, text: str, *, begin: bool, parse_special: bool) -> Tokenized:
        tokens = self._vocabulary.tokenize(text.encode("utf-8", "replace"), parse_special=parse_special)
        bos = self._vocabulary.bos
        # Templates often write the start token themselves; twice would change the answer.
        if begin and self._vocabulary.adds_bos and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
        return Tokenized(call, pack_tokens(tokens), text)

    def _spell(self, token: int) -> str:
        return self._vocabulary.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
