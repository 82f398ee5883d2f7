"""The models that can be asked for by name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.kit.errors import DomainError, Reason

_QUANTISATION: Final = re.compile(r"[.-](?:i?q\d\w*|f16|f32|bf16|fp16|mxfp4\w*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Entry:
    """A model by its name and its other names."""

    name: str
    aliases: tuple[str, ...]


def entry(stem: str, *, name: str, aliases: Sequence[str]) -> Entry:
    """Return the entry of a file called `stem`.gguf. Its name is `name`, or the stem without its quantisation.

    The file's own name always works as an alias, and so does the lower-case form.
    """
    chosen = name or _QUANTISATION.sub("", stem)
    others = [each for each in (*aliases, stem, chosen.lower()) if each and each != chosen]
    return Entry(chosen, tuple(dict.fromkeys(others)))


def check_name(asked: str, known: Entry) -> None:
    """Raise DomainError `not_found` unless `asked` names the model; empty means the default."""
    if asked and asked != known.name and asked not in known.aliases:
        raise DomainError(
            Reason.NOT_FOUND,
            f"there is no model {asked[:100]!r}; {known.name!r} is served",
            field="model",
            metadata={"model": asked[:100]},
        )
