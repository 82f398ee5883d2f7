"""How a model thinks and calls tools, read off its chat template.

Nothing else in a model file tells. A template that knows tools gets them as it expects them; for any other, and for
formats that are not known here, the tools and how to call them are described in the system message.
"""

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final


class ToolFormat(Enum):
    """How calls are written."""

    TAGGED = "tagged"
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes, Qwen 2.5 and 3, and the generic description."""
    BARE = "bare"
    """The whole answer is `{"name": ..., "parameters": ...}`: Llama 3."""
    LISTED = "listed"
    """`[TOOL_CALLS] [{"name": ..., "arguments": ..., "id": ...}]`: Mistral."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around what a model thinks. `switched`: the template obeys `enable_thinking`."""

    opening: str
    closing: str
    switched: bool


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a template tells. `native`: it takes the tools itself."""

    format: ToolFormat
    native: bool
    thinking: Thinking | None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must stay visible although they may be control tokens."""
        thinking = () if self.thinking is None else (self.thinking.opening, self.thinking.closing)
        return (*thinking, *OPENINGS[self.format])


OPENINGS: Final = {
    ToolFormat.TAGGED: ("<tool_call>",),
    ToolFormat.BARE: ('{"name": "', '{"name":"', '{ "name": "'),
    ToolFormat.LISTED: ("[TOOL_CALLS]",),
}
"""What begins a call."""

_MARKS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
_TOOLS: Final = re.compile(r"\btools\b")
# Templates that use the tags for calls that are no JSON.
_OTHER_TAGGED: Final = ("<function=", "<arg_key>")


@lru_cache(maxsize=16)
def dialect_of(template: str) -> Dialect:
    """Return what a chat template tells about its model."""
    found = _native_format(template) if _TOOLS.search(template) else None
    return Dialect(found or ToolFormat.TAGGED, found is not None, _thinking(template))


def _native_format(template: str) -> ToolFormat | None:
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else ToolFormat.LISTED
    if "<tool_call>" in template and not any(mark in template for mark in _OTHER_TAGGED):
        return ToolFormat.TAGGED
    if '"parameters": dictionary' in template:
        return ToolFormat.BARE
    return None


def _thinking(template: str) -> Thinking | None:
    for opening, closing in _MARKS:
        if closing in template:
            return Thinking(opening, closing, "enable_thinking" in template)
    return None


def settled(prompt: str, thinking: Thinking | None, *, wanted: bool | None, prefill: str | None) -> str:
    """Return a rendered prompt in which the model thinks only if that is wanted, with the caller's beginning of the answer.

    A block that is already open is closed when there is to be no thinking, or when the caller has begun the answer itself.
    """
    beginning = prefill or ""
    if thinking is None:
        return prompt + beginning
    if is_open(prompt, thinking):
        return prompt + (f"\n\n{thinking.closing}\n\n" if wanted is False or beginning else "") + beginning
    if wanted is False and not thinking.switched:
        return f"{prompt}{thinking.opening}\n\n{thinking.closing}\n\n{beginning}"
    return prompt + beginning


def is_open(prompt: str, thinking: Thinking | None) -> bool:
    """Return whether a prompt ends inside of a block of thoughts."""
    return (
        thinking is not None
        and prompt.rfind(thinking.opening) > prompt.rfind(thinking.closing)
        and prompt.rstrip().endswith(thinking.opening)
    )
