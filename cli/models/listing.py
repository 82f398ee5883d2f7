"""`omniserve models list`: what the mesh serves, or what lies in the models folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cli import http
from cli.errors import CliError
from cli.models.gguf import GgufError, read_header
from cli.terminal import human_size, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cli.settings import CliSettings

SERVED_HEADER = ("MODEL", "KIND", "STATE", "CONTEXT", "SIZE", "MEMORY", "STAYS", "QUANT", "CAPABILITIES")
_MIB = 1 << 20


@dataclass(frozen=True)
class LocalModel:
    """One file of the models folder. `problem` says why it cannot be served, if so."""

    file: str
    size_bytes: int
    name: str | None = None
    quantisation: str | None = None
    context_tokens: int | None = None
    problem: str | None = None


def list_served(url: str, settings: CliSettings, *, as_json: bool) -> None:
    """Print what GET /v1/models says. Raises CliError."""
    key = settings.api_key.get_secret_value()
    headers = {"Authorization": f"Bearer {key}"} if key else None
    with http.new_client(connect_s=settings.connect_timeout_s, headers=headers) as client:
        models = http.get_object(client, f"{url}/v1/models").get("data")
    if not isinstance(models, list):
        raise CliError(f"{url}/v1/models answers, but not with a list of models: is this the mesh's address?")
    if as_json:
        print(json.dumps(models, indent=2))
    else:
        rows = [served_row(model) for model in models if isinstance(model, dict)]
        print_table(SERVED_HEADER, rows)


def served_row(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line of the table; what the mesh does not say is a dash."""
    extra = model.get("omniserve")
    extra = extra if isinstance(extra, dict) else {}
    state = _word(extra.get("state"))
    return (
        _word(model.get("id")),
        _word(extra.get("kind")),
        f"{state}: {extra['failure']}" if extra.get("failure") else state,
        _word(extra.get("context_tokens")),
        _size(extra.get("size_mib")),
        _size(extra.get("memory_mib")),
        _stay(extra),
        _word(extra.get("quantisation")),
        ", ".join(map(str, extra.get("capabilities") or ())) or "-",
    )


def _size(mib: object) -> str:
    return human_size(mib * _MIB) if isinstance(mib, int) and mib else "-"


def _stay(extra: Mapping[str, Any]) -> str:
    """Return how long an idle model stays in memory."""
    if extra.get("pinned"):
        return "pinned"
    ttl_ms = extra.get("ttl_ms")
    return f"{ttl_ms / 1000:g} s" if isinstance(ttl_ms, int) and ttl_ms else "-"


def _word(value: object) -> str:
    return str(value) if value not in (None, "", 0) else "-"


def list_local(folder: Path, *, as_json: bool) -> None:
    """Print the GGUF files of the models folder."""
    models = local_models(folder)
    if as_json:
        print(json.dumps([asdict(model) for model in models], indent=2))
        return
    if not models:
        print(f"{folder} holds no GGUF file; `omniserve models pull` fetches one")
        return
    print_table(("FILE", "NAME", "SIZE", "QUANT", "CONTEXT"), [_local_row(model) for model in models])


def local_models(folder: Path) -> Sequence[LocalModel]:
    """Return every GGUF file below `folder`, by name. Unfinished downloads live elsewhere and are no models."""
    paths = sorted(path for path in folder.rglob("*.gguf") if ".partial" not in path.parts and path.is_file())
    return [_local_model(path, folder) for path in paths]


def _local_model(path: Path, folder: Path) -> LocalModel:
    file, size = str(path.relative_to(folder)), path.stat().st_size
    try:
        header = read_header(path)
    except (GgufError, OSError) as error:
        return LocalModel(file, size, problem=str(error))
    return LocalModel(file, size, header.name, header.quantisation, header.context_tokens)


def _local_row(model: LocalModel) -> tuple[str, ...]:
    size = human_size(model.size_bytes)
    if model.problem:
        return (model.file, f"unusable: {model.problem}", size, "-", "-")
    return (
        model.file,
        _word(model.name),
        size,
        _word(model.quantisation),
        _word(model.context_tokens),
    )
