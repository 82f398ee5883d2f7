"""The form of an answer: what it has to obey, and what takes it apart for the caller."""

import secrets
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from services.llm.core.constrain import constraint_of
from services.llm.core.dialect import dialect_of, is_open
from services.llm.core.prompt import Chat, Completion
from services.llm.core.recent import Recent
from services.llm.core.shaping import Shaper
from services.llm.core.structure import Structure
from services.llm.core.toolbox import Toolbox
from services.llm.core.wire import Constraint, TextReady
from services.llm.resident import Resident

_GRAMMARS_REMEMBERED: Final = 64


@dataclass(frozen=True, slots=True)
class Form:
    """What the answer has to obey, and what takes it apart. `shown`: control tokens that are text here."""

    constraint: Constraint | None
    shaper: Shaper | None = None
    shown: tuple[int, ...] = ()


@dataclass(slots=True)
class _Known:
    """What has been found out about a model: grammars that llama.cpp accepts, and marks that are one token, by template."""

    grammars: Recent = field(default_factory=lambda: Recent(_GRAMMARS_REMEMBERED))
    marks: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Forms:
    """Makes the forms of answers, and remembers what was found out about each model on the way."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Resident, _Known] = WeakKeyDictionary()

    async def of(
        self,
        content: Chat | Completion,
        structure: Structure | None,
        prompt: str,
        resident: Resident,
        vocabulary: TextReady,
    ) -> Form:
        """Return the form of the answer to a prompt; its grammar has been accepted by llama.cpp. Raises DomainError."""
        if isinstance(content, Completion):
            constraint = constraint_of(structure, Toolbox(), None, inside=False, may_think=False)
            await self._accept(constraint, resident)
            return Form(constraint)
        dialect = dialect_of(vocabulary.template)
        inside = is_open(prompt, dialect.thinking)
        may_think = content.thinking is not False
        constraint = constraint_of(structure, content.toolbox, dialect, inside=inside, may_think=may_think)
        await self._accept(constraint, resident)
        tools = bool(content.toolbox.offered)
        if not tools and dialect.thinking is None:
            return Form(constraint)
        shaper = Shaper(dialect, inside=inside, tools=tools, new_id=lambda: f"call_{secrets.token_hex(12)}")
        return Form(constraint, shaper, await self._shown(resident, vocabulary.template))

    async def _accept(self, constraint: Constraint | None, resident: Resident) -> None:
        if constraint is None:
            return
        grammars = self._of(resident).grammars
        if constraint.grammar not in grammars:
            await resident.text.check_grammar(constraint.grammar, constraint.field)
            grammars.add(constraint.grammar)

    async def _shown(self, resident: Resident, template: str) -> tuple[int, ...]:
        """Return the marks that are one token each: they are text, even where they are control tokens."""
        known = self._of(resident).marks
        found = known.get(template)
        if found is None:
            marks = dialect_of(template).marks
            texts = [await resident.text.tokenize(mark, begin=False, parse_special=True) for mark in marks]
            found = known[template] = tuple(int(text.tokens[0]) for text in texts if len(text.tokens) == 1)
        return found

    def _of(self, resident: Resident) -> _Known:
        return self._known.setdefault(resident, _Known())
