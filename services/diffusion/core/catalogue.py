"""The models that can be asked for by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from services.kit.errors import DomainError, Reason


class Kind(Enum):
    """What a model does."""

    IMAGE = "image"
    UPSCALER = "upscaler"


_DOES: Final = {Kind.IMAGE: "makes pictures", Kind.UPSCALER: "enlarges pictures"}
_ENABLES: Final = {
    Kind.IMAGE: "OMNISERVE_SD_MODEL (one file) or OMNISERVE_SD_DIFFUSION_MODEL (with its parts) names one; "
    "`omniserve models pull` fetches one",
    Kind.UPSCALER: "OMNISERVE_SD_UPSCALER names one; `make setup` makes one",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A model by its name and its other names."""

    name: str
    aliases: tuple[str, ...]
    kind: Kind

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of it."""
        return (self.name, *self.aliases)


def entry(stem: str, kind: Kind, *, name: str = "", aliases: Sequence[str] = ()) -> Entry:
    """Return the entry of a file called `stem`; that works as an alias when it has another name."""
    chosen = name or stem
    others = [each for each in (*aliases, stem, chosen.lower()) if each and each != chosen]
    return Entry(chosen, tuple(dict.fromkeys(others)), kind)


def find(asked: str, known: Sequence[Entry], kinds: Sequence[Kind]) -> Entry:
    """Return the entry of that name or alias; empty means the first that does what is wanted.

    Raises DomainError: `not_found`, naming the setting when nothing does it, or `invalid_request` for a model that does
    something else.
    """
    fitting = [each for each in known if each.kind in kinds]
    if not fitting:
        raise DomainError(Reason.NOT_FOUND, f"no model here {_DOES[kinds[0]]}: {_ENABLES[kinds[0]]}", field="model")
    if not asked:
        return fitting[0]
    for each in known:
        if asked in each.names:
            if each.kind in kinds:
                return each
            message = f"the model {each.name!r} {_DOES[each.kind]}; this needs one that {_DOES[kinds[0]]}"
            raise DomainError(Reason.INVALID_REQUEST, message, field="model")
    served = ", ".join(repr(each.name) for each in fitting)
    message = f"there is no model {asked[:100]!r}; {served} {'is' if len(fitting) == 1 else 'are'} served"
    raise DomainError(Reason.NOT_FOUND, message, field="model", metadata={"model": asked[:100]})
