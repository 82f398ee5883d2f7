"""From a conversation to what a chat template gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from services.kit.errors import DomainError, Reason
from services.llm.core.toolbox import Toolbox

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MOST_TURNS: Final = 4096


@dataclass(frozen=True, slots=True)
class Call:
    """A function call that the model made earlier; `arguments` as JSON text and, where they are an object, as that."""

    identity: str
    name: str
    arguments: str
    parsed: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `texts`: its text parts; `media`: places of parts that are no text."""

    role: str
    texts: tuple[str, ...] = ()
    media: tuple[int, ...] = ()
    name: str | None = None
    calls: tuple[Call, ...] = ()
    answers: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with the variables for the template. `thinking` None: the template's own default.

    `drop_oldest`: turns may be left out when not all fit (history.py).
    """

    turns: tuple[Turn, ...]
    thinking: bool | None = None
    variables: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    toolbox: Toolbox = field(default_factory=Toolbox)
    drop_oldest: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """A text or token sequence to continue: exactly one of the two. `echo`: it comes before the answer.

    `suffix`: what follows the gap that the answer fills; only with a text.
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    echo: bool = False
    suffix: str | None = None


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """What the template gets. `prefill`: the beginning of the answer, given by the caller, for the end of the prompt."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    prefill: str | None
    thinking: bool | None = None


def template_inputs(chat: Chat, *, developer_role: bool, system: str | None = None) -> TemplateInputs:
    """Return the template's inputs.

    `developer_role`: the template knows it; else it reads as system. `system`: goes in front of a chat without a message
    of either role; None leaves that to the template.

    Raises DomainError `invalid_request` or `unsupported`, naming the field.
    """
    if not chat.turns:
        raise _refusal("messages", "is empty: a chat has at least one message")
    if len(chat.turns) > MOST_TURNS:
        raise _refusal("messages", f"has {len(chat.turns)} entries; at most {MOST_TURNS} are allowed")
    for place, turn in enumerate(chat.turns):
        _check(place, turn)
    turns: Sequence[Turn] = chat.turns
    prefill = None
    if system is not None and not any(turn.role in {"system", "developer"} for turn in turns):
        turns = (Turn("system", (system,)), *turns)
    if turns[-1].role == "assistant" and not turns[-1].calls:
        prefill = "".join(turns[-1].texts)
        turns = turns[:-1]
    variables = dict(chat.variables)
    if chat.thinking is not None:
        variables["enable_thinking"] = chat.thinking
    return TemplateInputs(
        [_message(turn, developer_role=developer_role) for turn in turns], variables, prefill, chat.thinking
    )


def _check(place: int, turn: Turn) -> None:
    path = f"messages[{place}]"
    if turn.role not in ROLES:
        raise _refusal(f"{path}.role", f"is {turn.role[:40]!r}; {', '.join(ROLES)} are known")
    if turn.media:
        part = f"{path}.content[{turn.media[0]}].media"
        raise DomainError(Reason.UNSUPPORTED, f"'{part}': this model reads text only", field=part)
    if turn.calls and turn.role != "assistant":
        raise _refusal(f"{path}.tool_calls", f"belong to assistant messages, not to {turn.role}")


def _message(turn: Turn, *, developer_role: bool) -> dict[str, Any]:
    role = "system" if turn.role == "developer" and not developer_role else turn.role
    message: dict[str, Any] = {"role": role, "content": "".join(turn.texts)}
    if turn.name is not None:
        message["name"] = turn.name
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.identity,
                "type": "function",
                # Templates written for Hugging Face expect an object here, not its text.
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if call.parsed is None else dict(call.parsed),
                },
            }
            for call in turn.calls
        ]
    if turn.answers is not None:
        message["tool_call_id"] = turn.answers
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    return message


def _refusal(path: str, sentence: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, f"'{path}' {sentence}", field=path)
