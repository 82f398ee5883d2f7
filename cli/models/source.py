"""What `omniserve models pull` was asked for: a file at an address, or a file of a model repository. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from cli.errors import CliError, Exit

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class UrlSource:
    """A file at a plain address; `file_name` is the last part of its path."""

    url: str
    file_name: str


@dataclass(frozen=True)
class HubSource:
    """A repository on the model hub; `wanted` is a file name or a quantisation, or None to let the repository decide."""

    repository: str
    wanted: str | None
    revision: str | None = None


def parse_source(text: str, hub_endpoint: str) -> UrlSource | HubSource:
    """Read `owner/name`, `owner/name:quant or file`, `hf:...`, the hub's own page addresses, or any http(s) address.

    `hub_endpoint` is the hub's base address. Raises CliError (usage) when the text is none of these.
    """
    text = text.strip()
    if text.startswith(("http://", "https://")):
        return _from_address(text, hub_endpoint.rstrip("/"))
    return _from_repository(text.removeprefix("hf:"), original=text)


def _from_repository(text: str, *, original: str) -> HubSource:
    repository, _, wanted = text.partition(":")
    # owner/name/path/file.gguf is what people copy from a file listing.
    parts = repository.split("/")
    if len(parts) > 2 and not wanted:
        repository, wanted = "/".join(parts[:2]), "/".join(parts[2:])
    repository, at, revision = repository.partition("@")
    if not _REPOSITORY.fullmatch(repository) or (at and not _REVISION.fullmatch(revision)):
        raise CliError(
            f"{original!r} is neither a repository (owner/name, owner/name:Q4_K_M, owner/name:file.gguf) nor an http(s) address",
            code=Exit.USAGE,
        )
    return HubSource(repository, wanted or None, revision or None)


def _from_address(url: str, hub: str) -> UrlSource | HubSource:
    parts = urlsplit(url)
    if not parts.hostname:
        raise CliError(f"{url!r} has no host", code=Exit.USAGE)
    if url.startswith(hub + "/"):
        segments = [unquote(part) for part in parts.path.removeprefix(urlsplit(hub).path).strip("/").split("/")]
        match segments:
            case [owner, name]:
                return HubSource(f"{owner}/{name}", None)
            case [owner, name, "resolve" | "blob", revision, *path] if path:
                return HubSource(f"{owner}/{name}", "/".join(path), revision)
            case [owner, name, "tree", revision]:
                return HubSource(f"{owner}/{name}", None, revision)
            case _:
                pass
    return UrlSource(url, safe_file_name(unquote(parts.path.rsplit("/", 1)[-1]), url))


def safe_file_name(name: str, origin: str) -> str:
    """Return `name` when it can stand alone in the models folder. Raises CliError (usage) when it cannot."""
    if not name or name.startswith(".") or "/" in name or "\\" in name or not name.isprintable():
        raise CliError(f"no file name can be taken from {origin!r}: give one with --name", code=Exit.USAGE)
    return name


def normal_digest(text: str) -> str:
    """Return a SHA-256 given on the command line in lower case. Raises CliError (usage) when it is not one."""
    digest = text.strip().removeprefix("sha256:").lower()
    if not _DIGEST.fullmatch(digest):
        raise CliError(f"--sha256 {text!r} is not a SHA-256 digest (64 hexadecimal digits)", code=Exit.USAGE)
    return digest
