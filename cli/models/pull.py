"""`omniserve models pull`: fetch a model into the models folder."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from cli import http
from cli.errors import CliError
from cli.models import store
from cli.models.gguf import GgufError, read_header
from cli.models.source import UrlSource, normal_digest, parse_source, safe_file_name
from cli.terminal import console, human_size, note

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.progress import Progress, TaskID

    from cli.models.download import Meter


def run(text: str, *, folder: Path, sha256: str | None, name: str | None, force: bool) -> None:
    """Fetch what `text` names and print where it is. Raises CliError."""
    from cli.models import hub  # noqa: PLC0415  the hub's library is slow to import

    source = parse_source(text, hub.endpoint())
    expected = normal_digest(sha256) if sha256 is not None else None
    chosen = safe_file_name(name, name) if name is not None else None
    store.prepare(folder)
    if isinstance(source, UrlSource):
        _pull_url(source, folder / (chosen or source.file_name), expected=expected, force=force)
        return
    paths = hub.pull(source, folder, name=chosen, sha256=expected, force=force, note=note)
    for path in paths:
        _report(path)
    note(serve_hint(paths[0]))


def _pull_url(source: UrlSource, target: Path, *, expected: str | None, force: bool) -> None:
    from cli.models.download import fetch  # noqa: PLC0415  only this branch needs the HTTP client

    if target.exists() and not force:
        _existing(target, expected)
        return
    with http.new_client(connect_s=10.0, read_s=60.0) as client, _meter(target.name) as meter:
        fetched = fetch(client, source.url, target, sha256=expected, meter=meter, note=note)
    _report(target, digest=fetched.sha256)
    note(serve_hint(target))


def _existing(target: Path, expected: str | None) -> None:
    if expected is not None and store.sha256_of(target) != expected:
        raise CliError(f"{target} exists and has another SHA-256; --force replaces it, --name keeps both")
    note(
        f"{target.name} is there already{'' if expected is None else ' and its checksum is right'}; --force fetches it again"
    )
    _report(target)


def serve_hint(path: Path) -> str:
    """Return how to serve the model; llama.cpp finds the other parts of a split one beside its first."""
    return f"serve it with OMNISERVE_LLM_GGUF={path.absolute()}"


def _report(path: Path, *, digest: str | None = None) -> None:
    try:
        header = read_header(path)
    except GgufError as error:
        raise CliError(f"{path}: {error}") from error
    what = " ".join(part for part in (header.name or header.architecture, header.quantisation) if part)
    print(f"{path}  {human_size(header.size_bytes)}{f'  {what}' if what else ''}")
    print(f"sha256 {digest or store.sha256_of(path)}")


@contextmanager
def _meter(name: str) -> Iterator[Meter]:
    """Show a bar on a terminal and nothing elsewhere: a log file is no place for a bar."""
    terminal = console(to_stderr=True)
    if not terminal.is_terminal:
        yield _Silent()
        return
    from rich.progress import (  # noqa: PLC0415  only a terminal needs it
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(name),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal, transient=True) as progress:
        yield _Bar(progress, progress.add_task(name, total=None))


class _Silent:
    def at(self, done: int, total: int | None) -> None:
        """Show nothing."""


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def at(self, done: int, total: int | None) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, total=total)
