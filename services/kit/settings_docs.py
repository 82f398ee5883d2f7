"""Write the settings tables: docs/settings.md and the marked part of each room's README.

`python -m services.kit.settings_docs` writes, with `--check` it only says what has drifted (exit status 1).
"""

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from services.kit.settings import MeshSettings, ServiceSettings, settings_table

ROOT: Final = Path(__file__).resolve().parents[2]
# Where rooms keep their settings. The kit's own module holds the base classes, which are no room's.
_PATTERNS: Final = ("services/*/settings.py", "facade/settings.py", "cli/settings.py", "deploy/*settings*.py")
_BASE: Final = ROOT / "services" / "kit"
_BEGIN: Final = "<!-- settings:begin -->"
_END: Final = "<!-- settings:end -->"

_HEAD: Final = """\
# Settings

Generated from the code by `python -m services.kit.settings_docs`; do not edit. Every setting is an environment variable.
A set but empty variable counts as not set. Lists are separated by commas. An unknown variable that begins with
`OMNISERVE_` stops the start with the nearest known name. Secrets have no default and are never shown.
"""
_SHARED: Final = """
## Every service

A name here works for all services; `OMNISERVE_<SERVICE>_<REST>` (for example `OMNISERVE_LLM_LOG_LEVEL`) sets it for one
and wins.
"""


@dataclass(frozen=True, slots=True)
class Room:
    """A folder with settings and the classes found there."""

    folder: Path
    classes: tuple[type[ServiceSettings], ...]


def discover(root: Path = ROOT) -> list[type[ServiceSettings]]:
    """Return every settings class of every room, by importing the rooms' settings modules."""
    return [cls for room in rooms(root) for cls in room.classes]


def rooms(root: Path = ROOT) -> list[Room]:
    """Return the rooms that have settings, by folder name. A module that cannot be imported raises its own error."""
    found: dict[Path, list[type[ServiceSettings]]] = {}
    for path in sorted({path for pattern in _PATTERNS for path in root.glob(pattern)}):
        if path.parent != _BASE:
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found.setdefault(path.parent, []).extend(_classes_in(importlib.import_module(name)))
    return [Room(folder, tuple(classes)) for folder, classes in sorted(found.items()) if classes]


def _classes_in(module: ModuleType) -> list[type[ServiceSettings]]:
    members = [member for _, member in inspect.getmembers(module, inspect.isclass)]
    return [
        m
        for m in members
        if issubclass(m, ServiceSettings) and m.__module__ == module.__name__ and hasattr(m, "service")
    ]


@dataclass(frozen=True, slots=True)
class Documents:
    """What the files with settings tables should contain, and a sentence for each README that has no place for one."""

    texts: Mapping[Path, str]
    problems: tuple[str, ...]


def documents(found: Iterable[Room], root: Path = ROOT) -> Documents:
    """Return docs/settings.md and every room's README with the tables of its code."""
    texts: dict[Path, str] = {}
    problems: list[str] = []
    parts = [_HEAD, _SHARED, _shared_table()]
    for room in found:
        own = "\n\n".join(settings_table(cls) for cls in room.classes)
        title = room.folder.relative_to(root).as_posix()
        parts.append(f"\n## {title}\n\n{own}\n")
        readme = room.folder / "README.md"
        text = _with_table(readme, own)
        if text is None:
            problems.append(f"{title}/README.md needs the lines {_BEGIN} and {_END} where its settings table goes")
        else:
            texts[readme] = text
    texts[root / "docs" / "settings.md"] = "".join(parts)
    return Documents(texts, tuple(problems))


def _shared_table() -> str:
    class Shared(MeshSettings):
        service = "service"

    return f"\n{settings_table(Shared, shared=True)}\n"


def _with_table(readme: Path, table: str) -> str | None:
    """Return the README with the table between the markers, or None when it has no markers."""
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table}\n{_END}{after}" if begin and end else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m services.kit.settings_docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file has drifted")
    check = parser.parse_args(arguments).check
    wanted = documents(rooms())
    sys.stderr.writelines(f"{problem}\n" for problem in wanted.problems)
    drifted = [p for p, text in wanted.texts.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    for path in drifted:
        sys.stderr.write(f"{'drifted' if check else 'wrote'}: {path.relative_to(ROOT)}\n")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted.texts[path], encoding="utf-8")
    return 1 if wanted.problems or (check and drifted) else 0


if __name__ == "__main__":
    sys.exit(main())
