"""Which files of a repository to fetch: by quantisation, by name, or the only one there is. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from cli.errors import CliError
from cli.terminal import human_size

if TYPE_CHECKING:
    from collections.abc import Sequence

_QUANT = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?I?Q\d(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|FP32|TQ\d_0|MXFP4(?:_MOE)?)(?![A-Z0-9])",
    re.IGNORECASE,
)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
# A projector reads images for a model; alone it cannot answer anything.
_PROJECTOR = re.compile(r"(^|[-_.])mmproj([-_.]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class RepoFile:
    """One file of a repository. `sha256` is known for large files, `git_sha1` for small ones."""

    path: str
    size: int | None
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True)
class Choice:
    """One model of the repository: a file, or all shards of one."""

    label: str
    files: tuple[RepoFile, ...]

    @property
    def size(self) -> int | None:
        """Bytes in all; None when a size is unknown."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def quantisation_of(path: str) -> str | None:
    """Return the quantisation that a file name states, in upper case; the last one when it states several."""
    found = _QUANT.findall(PurePosixPath(path).name.removesuffix(".gguf"))
    return found[-1].upper() if found else None


def choices_of(files: Sequence[RepoFile]) -> list[Choice]:
    """Return the models among `files`, shards put together, projectors left out, smallest first."""
    whole: dict[str, list[RepoFile]] = {}
    for file in files:
        if file.path.lower().endswith(".gguf") and not _PROJECTOR.search(PurePosixPath(file.path).name):
            whole.setdefault(_SHARD.sub(".gguf", file.path), []).append(file)
    found = [Choice(label, tuple(sorted(parts, key=lambda part: part.path))) for label, parts in whole.items()]
    return sorted(found, key=lambda choice: (choice.size is None, choice.size or 0, choice.label))


def choose(repository: str, files: Sequence[RepoFile], wanted: str | None) -> Choice:
    """Return what to fetch from `repository`.

    Raises CliError when nothing matches, or when several do: the message lists what there is.
    """
    choices = choices_of(files)
    if wanted is not None:
        exact = [Choice(file.path, (file,)) for file in files if file.path.lower() == wanted.lower()]
        matching = exact or _matching(choices, wanted)
    else:
        matching = choices
    if len(matching) == 1:
        _check_shards(matching[0])
        return matching[0]
    raise CliError(_refusal(repository, choices, matching, wanted))


def _matching(choices: Sequence[Choice], wanted: str) -> list[Choice]:
    """Match ever more loosely, and stop at the first way that finds anything."""
    text = wanted.lower()
    tests = (
        lambda choice: choice.label.lower() == text,
        lambda choice: PurePosixPath(choice.label).name.lower() in (text, f"{text}.gguf"),
        lambda choice: (quantisation_of(choice.label) or "").lower() == text,
        lambda choice: text in choice.label.lower(),
    )
    for test in tests:
        if found := [choice for choice in choices if test(choice)]:
            return found
    return []


def _check_shards(choice: Choice) -> None:
    shard = _SHARD.search(choice.files[0].path)
    if shard and len(choice.files) not in (1, int(shard[2])):
        raise CliError(f"{choice.label} is incomplete in the repository: {len(choice.files)} of {int(shard[2])} parts")


def _refusal(repository: str, choices: Sequence[Choice], matching: Sequence[Choice], wanted: str | None) -> str:
    if not choices:
        return f"{repository} has no GGUF file; look for a repository whose name ends in -GGUF"
    if wanted is not None and not matching:
        head = f"{repository} has nothing that matches {wanted!r}; it has"
    else:
        head = f"{repository} has several models; choose one of"
    names = [_short(choice, choices) for choice in matching or choices]
    width = max(map(len, names))
    rows = [
        f"  {repository}:{name:<{width}}  {_size(choice)}"
        for name, choice in zip(names, matching or choices, strict=True)
    ]
    return "\n".join([f"{head}:", *(row.rstrip() for row in rows)])


def _short(choice: Choice, among: Sequence[Choice]) -> str:
    """Return the quantisation when it names one model only, else the file's path."""
    quantisation = quantisation_of(choice.label)
    unique = quantisation and sum(quantisation_of(other.label) == quantisation for other in among) == 1
    return quantisation if quantisation and unique else choice.label


def _size(choice: Choice) -> str:
    return "" if choice.size is None else human_size(choice.size)
