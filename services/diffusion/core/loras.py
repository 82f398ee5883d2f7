"""Which adapters a request may name, and how: by an id below one folder for everybody, by a path for the operator."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.diffusion.core.options import MOST_LORAS, AskedLora, refusal
from services.kit.errors import DomainError, Reason

ENDINGS: Final = (".safetensors", ".gguf")
_LONGEST_NAME: Final = 200
_LONGEST_PATH: Final = 4096
_MOST_SCALE: Final = 10.0


@dataclass(frozen=True, slots=True)
class LoraName:
    """An adapter that may be asked for. `parts`: names below the folder, one after the other; `path`: instead, the operator's.

    `field`: what it is called in the contract. `filename` is the last of the parts, None when the folder has only one.
    """

    field: str
    lora_id: str
    filename: str | None
    path: str | None
    scale: float


def check_loras(asked: Sequence[AskedLora], *, has_folder: bool, is_operator: bool) -> tuple[LoraName, ...]:
    """Return what may be looked up. Raises DomainError, naming the field: `invalid_request`, `unsupported`."""
    if len(asked) > MOST_LORAS:
        raise refusal("options.loras", f"has {len(asked)} adapters; the most is {MOST_LORAS}")
    found = tuple(
        _checked(each, f"options.loras[{place}]", has_folder=has_folder, is_operator=is_operator)
        for place, each in enumerate(asked)
    )
    seen: set[tuple[str, str | None, str | None]] = set()
    for each in found:
        key = (each.lora_id, each.filename, each.path)
        if key in seen:
            raise refusal(each.field, "is named twice; the engine knows one strength for each adapter")
        seen.add(key)
    return found


def _checked(asked: AskedLora, field: str, *, has_folder: bool, is_operator: bool) -> LoraName:
    scale = 1.0 if asked.scale is None else asked.scale
    if not math.isfinite(scale) or abs(scale) > _MOST_SCALE:
        raise refusal(f"{field}.scale", f"is {scale:g}; -{_MOST_SCALE:g} to {_MOST_SCALE:g} is allowed")
    if asked.path is not None:
        if not is_operator:
            raise refusal(f"{field}.path", "is for the operator's listener only; name a catalogue's id instead")
        if not asked.path.startswith("/") or "\0" in asked.path or len(asked.path) > _LONGEST_PATH:
            raise refusal(f"{field}.path", "must be an absolute path")
        return LoraName(field, "", None, asked.path, scale)
    if not has_folder:
        message = f"'{field}': no adapters are served; OMNISERVE_LORA_DIR names their folder"
        raise DomainError(Reason.UNSUPPORTED, message, field=field)
    check_name(f"{field}.catalogue.lora_id", asked.lora_id)
    if asked.filename is not None:
        check_name(f"{field}.catalogue.filename", asked.filename)
        if not asked.filename.lower().endswith(ENDINGS):
            raise refusal(f"{field}.catalogue.filename", f"must end with {' or '.join(ENDINGS)}")
    return LoraName(field, asked.lora_id, asked.filename, None, scale)


def check_name(field: str, name: str) -> None:
    """Raise DomainError for what is no plain name of one file or folder.

    Characters that look like others or are not seen are refused, and so are names that another spelling of Unicode turns into
    something else: what is compared and what is opened must be the same.
    """
    if not 0 < len(name) <= _LONGEST_NAME:
        raise refusal(field, f"must have 1 to {_LONGEST_NAME} characters")
    if name.startswith(".") or "/" in name or "\\" in name:
        raise refusal(field, "must be a name without any folder")
    if unicodedata.normalize("NFKC", name) != name:
        raise refusal(field, "must be written in Unicode's normal form NFKC")
    if any(unicodedata.category(each)[0] in "CZ" and each != " " for each in name):
        raise refusal(field, "must not hold characters that cannot be seen")


def chosen(names: Sequence[str], field: str) -> str:
    """Return the only adapter among the names of a folder. Raises DomainError."""
    found = sorted(each for each in names if each.lower().endswith(ENDINGS) and not each.startswith("."))
    if not found:
        raise DomainError(Reason.NOT_FOUND, f"'{field}' names a folder without any adapter", field=field)
    if len(found) > 1:
        raise refusal(field, f"has {len(found)} adapters; say which by 'filename'")
    return found[0]
