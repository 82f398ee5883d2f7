"""Fetches a model from a repository of the model hub, with the hub's own library: it resumes and knows the hub's storage."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from cli import http
from cli.errors import CliError, Exit
from cli.models import store
from cli.models.choice import RepoFile, choose
from cli.models.download import unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cli.models.choice import Choice
    from cli.models.source import HubSource

_LIST_TIMEOUT_S = 15.0
# Whatever HTTP library the hub's library is built on, this is the root of its errors.
_HUB_HTTP_ERROR = cast("type[Exception]", next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"))


def endpoint() -> str:
    """Return the hub's base address: the library's, so that HF_ENDPOINT works."""
    return constants.ENDPOINT


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: tuple[RepoFile, ...]


def list_files(source: HubSource, folder: Path) -> Listing:
    """Ask the hub what the repository holds. Raises CliError in one line; `folder` is named when there is no way out."""
    with _in_one_line(source, folder):
        info = HfApi().model_info(
            source.repository, revision=source.revision, files_metadata=True, timeout=_LIST_TIMEOUT_S
        )
    files = tuple(
        RepoFile(
            path=item.rfilename,
            size=item.size,
            sha256=item.lfs.sha256 if item.lfs else None,
            git_sha1=None if item.lfs else item.blob_id,
        )
        for item in info.siblings or ()
    )
    if info.sha is None:
        raise CliError(f"the hub names no commit for {source.repository}")
    return Listing(info.sha, files)


def pull(
    source: HubSource, folder: Path, *, name: str | None, sha256: str | None, force: bool, note: Callable[[str], None]
) -> list[Path]:
    """Fetch what `source` names into `folder` and return the files' final paths.

    A file appears under its final name only when its checksum (the hub's, and `sha256` when given) and its header are
    right. Raises CliError.
    """
    listing = list_files(source, folder)
    choice = choose(source.repository, listing.files, source.wanted)
    if len(choice.files) > 1 and (name is not None or sha256 is not None):
        raise CliError(
            f"--name and --sha256 speak of one file, but {choice.label} has {len(choice.files)} parts", code=Exit.USAGE
        )
    if sha256 is not None:
        choice = _expecting(choice, sha256)
    staging = folder / ".partial" / source.repository.replace("/", "--")
    targets = [folder / (name or PurePosixPath(file.path).name) for file in choice.files]
    missing = [pair for pair in zip(choice.files, targets, strict=True) if not _is_there(*pair, force=force, note=note)]
    _require_space(choice, [file for file, _ in missing], folder, staging)
    if not sys.stderr.isatty():
        disable_progress_bars()
    for file, target in missing:
        note(f"fetching {source.repository}/{file.path} at {listing.commit[:12]}")
        _fetch(source, file, listing.commit, staging, target)
    shutil.rmtree(staging, ignore_errors=True)
    return targets


def _expecting(choice: Choice, sha256: str) -> Choice:
    """Refuse before anything is fetched when the hub itself states another digest."""
    (file,) = choice.files
    if file.sha256 not in (None, sha256):
        raise CliError(f"{file.path}: the hub states SHA-256 {file.sha256}, expected {sha256}; nothing was fetched")
    return replace(choice, files=(replace(file, sha256=sha256),))


def _is_there(file: RepoFile, target: Path, *, force: bool, note: Callable[[str], None]) -> bool:
    if not target.exists() or force:
        return False
    if _matches(file, target):
        note(f"{target.name} is there already and its checksum is right")
        return True
    raise CliError(f"{target} exists and is another file; --force replaces it, --name keeps both")


def _require_space(choice: Choice, missing: list[RepoFile], folder: Path, staging: Path) -> None:
    if choice.size is None:
        return
    begun = sum(path.stat().st_size for path in staging.rglob("*.incomplete")) if staging.exists() else 0
    store.require_space(folder, max(0, sum(file.size or 0 for file in missing) - begun))


def _fetch(source: HubSource, file: RepoFile, commit: str, staging: Path, target: Path) -> None:
    with _in_one_line(source, target.parent):
        finished = Path(hf_hub_download(source.repository, file.path, revision=commit, local_dir=staging))
    if not _matches(file, finished):
        finished.unlink()
        expected = file.sha256 or file.git_sha1
        raise CliError(f"{file.path}: the checksum is not {expected}; the download was thrown away")
    store.publish(finished, target)


def _matches(file: RepoFile, path: Path) -> bool:
    """Compare with the hub's checksum: SHA-256 of large files, git's id of small ones."""
    if file.size is not None and path.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        return store.sha256_of(path) == file.sha256
    return file.git_sha1 is None or store.git_sha1_of(path) == file.git_sha1


@contextmanager
def _in_one_line(source: HubSource, folder: Path) -> Iterator[None]:
    repository = source.repository
    try:
        yield
    except GatedRepoError as error:
        raise CliError(f"{repository} is gated: accept its terms on its page, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise CliError(f"{repository} does not exist on {endpoint()}, or needs a login: set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise CliError(f"{repository} has no revision {source.revision!r}") from error
    except OfflineModeIsEnabled as error:
        raise CliError("HF_HUB_OFFLINE is set, so nothing can be fetched from the model hub: unset it") from error
    except HFValidationError as error:
        raise CliError(f"{repository!r} is not the name of a repository", code=Exit.USAGE) from error
    except HfHubHTTPError as error:
        raise CliError(
            f"the model hub answered {http.status_phrase(error.response.status_code)} for {repository}"
        ) from error
    except (_HUB_HTTP_ERROR, LocalEntryNotFoundError) as error:
        raise CliError(unreachable(endpoint(), _root(error), folder)) from error
    except OSError as error:
        raise CliError(f"fetching {repository} failed: {error}; run the same command again to resume") from error


def _root(error: Exception) -> Exception:
    """Return the first cause that says something: the library wraps a broken connection in a missing file."""
    cause = error.__cause__
    return cause if isinstance(error, LocalEntryNotFoundError) and isinstance(cause, Exception) else error
