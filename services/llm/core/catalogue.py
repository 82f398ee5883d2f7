"""The models that can be asked for by name."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from services.kit.errors import DomainError, Reason

_QUANTISATION: Final = re.compile(r"[.-](?:i?q\d\w*|f16|f32|bf16|fp16|mxfp4\w*)$", re.IGNORECASE)
_MOST_NAMED: Final = 20
"""Names that a refusal lists at most."""


class Kind(Enum):
    """What a model does."""

    CHAT = "chat"
    EMBEDDING = "embedding"
    RERANK = "rerank"


_DOES: Final = {
    Kind.CHAT: "generates text",
    Kind.EMBEDDING: "makes vectors",
    Kind.RERANK: "scores pairs of texts",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A model by its name and its other names."""

    name: str
    aliases: tuple[str, ...]
    kind: Kind = Kind.CHAT

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of it."""
        return (self.name, *self.aliases)


def entry(stem: str, *, name: str, aliases: Sequence[str]) -> Entry:
    """Return the entry of a file called `stem`.gguf. Its name is `name`, or the stem without its quantisation.

    The file's own name always works as an alias, and so does the lower-case form.
    """
    chosen = name or _QUANTISATION.sub("", stem)
    others = [each for each in (*aliases, stem, chosen.lower()) if each and each != chosen]
    return Entry(chosen, tuple(dict.fromkeys(others)))


def find(asked: str, known: Sequence[Entry], *, kinds: Sequence[Kind]) -> Entry:
    """Return the entry of that name or alias; empty means the first that does what is wanted.

    Raises DomainError: `not_found`, or `invalid_request` for a model that does something else.
    """
    fitting = [each for each in known if each.kind in kinds]
    if not asked and fitting:
        return fitting[0]
    for each in known:
        if asked in each.names:
            if each.kind in kinds:
                return each
            wanted = " or ".join(_DOES[kind] for kind in kinds)
            message = f"the model {each.name!r} {_DOES[each.kind]}; this needs one that {wanted}"
            raise DomainError(Reason.INVALID_REQUEST, message, field="model")
    served = ", ".join(repr(each.name) for each in fitting[:_MOST_NAMED]) or "none that can do this"
    verb = "is" if len(fitting) < 2 else "are"
    raise DomainError(
        Reason.NOT_FOUND,
        f"there is no model {asked[:100]!r}; {served} {verb} served",
        field="model",
        metadata={"model": asked[:100]},
    )


def repeated(entries: Sequence[Entry]) -> Iterator[tuple[int, str, str]]:
    """Return place, name, and whose it is already, for each name that stands for two models."""
    owners: dict[str, str] = {}
    for place, each in enumerate(entries):
        for name in dict.fromkeys(each.names):
            if name in owners:
                yield place, name, owners[name]
            owners.setdefault(name, each.name)
