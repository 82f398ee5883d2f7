"""The tools of a chat, as the caller gave them."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from services.kit.errors import DomainError, Reason

MOST_TOOLS: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Use(Enum):
    """Whether tools are called."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments as text."""

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a chat, and whether they are used. `parallel`: several calls may be made at once."""

    tools: tuple[Tool, ...] = ()
    use: Use = Use.AUTO
    name: str = ""
    parallel: bool = True

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model hears of."""
        return () if self.use is Use.NONE else self.tools

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.use in {Use.REQUIRED, Use.NAMED}


def check_tools(box: Toolbox) -> None:
    """Raise DomainError `invalid_request` for tools that cannot be offered."""
    if len(box.tools) > MOST_TOOLS:
        raise _refusal("tools", f"has {len(box.tools)} entries; at most {MOST_TOOLS} are allowed")
    names: set[str] = set()
    for place, tool in enumerate(box.tools):
        if not _NAME.fullmatch(tool.name):
            raise _refusal(
                f"tools[{place}].name", f"is {tool.name[:70]!r}; 1 to 64 letters, digits, '_' and '-' are allowed"
            )
        if tool.name in names:
            raise _refusal(f"tools[{place}].name", f"is {tool.name!r} a second time")
        names.add(tool.name)
    if box.forced and not box.tools:
        raise _refusal("tool_choice", "asks for a call, but no 'tools' are given")
    if box.use is Use.NAMED and box.name not in names:
        raise _refusal("tool_choice.name", f"is {box.name[:70]!r}, which is not among 'tools'")


def _refusal(path: str, sentence: str) -> DomainError:
    return DomainError(Reason.INVALID_REQUEST, f"'{path}' {sentence}", field=path)
