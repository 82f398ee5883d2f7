"""Install the peers that bench.transport compares with: LiteLLM's proxy, and what a relay in Python needs.

They go into a virtual environment of their own below build/, never the mesh's: LiteLLM alone brings a hundred packages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from typing import TYPE_CHECKING

from bench.processes import CHECKOUT
from bench.transport.exchange import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

VERSION = "1.108.6"
"""The newest whose extra `proxy` PyPI can satisfy: later ones want companions in versions that are not there."""
CACHE = CHECKOUT / "build" / "peer"
INSTALL_LIMIT_S = 60 * 60


class PeerError(Exception):
    """The peers cannot be installed here; the message says why."""


def requirements(version: str = VERSION) -> list[str]:
    """Return what is installed: LiteLLM's proxy brings aiohttp and uvloop, which is what the relay runs on."""
    return [f"litellm[proxy]=={version}"]


def folder(version: str = VERSION, cache: Path = CACHE) -> Path:
    """Return the environment's place."""
    return cache / f"litellm-{version}"


def installed(version: str = VERSION, cache: Path = CACHE) -> Path | None:
    """Return the environment, None while there is none or a half one."""
    root = folder(version, cache)
    stamp = root / "installed.json"
    return root if stamp.exists() and json.loads(stamp.read_text()) == requirements(version) else None


def install(version: str = VERSION, cache: Path = CACHE) -> Path:
    """Return the environment, made first where it is missing. Raises PeerError."""
    root = folder(version, cache)
    if installed(version, cache) is None:
        venv.create(root, with_pip=True, clear=True)
        command = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements(version)]
        try:
            subprocess.run(command, check=True, stdout=sys.stderr, timeout=INSTALL_LIMIT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise PeerError(f"installing LiteLLM {version} failed: {error}") from error
        (root / "installed.json").write_text(json.dumps(requirements(version)))
    return root


def litellm_config(worker: int) -> str:
    """Return LiteLLM's configuration (YAML, which JSON is): one model at the worker; no database, no key, no callback."""
    model = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{worker}/v1", "api_key": "none"}
    return json.dumps(
        {
            "model_list": [{"model_name": MODEL, "litellm_params": model}],
            "litellm_settings": {"set_verbose": False, "telemetry": False},
        }
    )


def litellm_command(root: Path, config: Path, port: int, workers: int) -> list[str]:
    """Return the command that serves the configuration.

    Its workers import for longer than the five seconds after which their supervisor would kill them as dead.
    """
    where = ["--host", "127.0.0.1", "--port", str(port)]
    many = ["--num_workers", str(workers), "--timeout_worker_healthcheck", "300"]
    return [str(root / "bin" / "litellm"), "--config", str(config), *where, *many]


def litellm_environ(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return LiteLLM's environment as its page on production asks: production mode, errors only in the log.

    Prices of models come from its own package, since it would otherwise ask the network for them at the start. That it asks
    nobody for a key has to be permitted by name, and is the cheaper way for it.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(("OMNISERVE_", "OTEL_", "PYTHON"))}
    return kept | {
        "PATH": f"{root / 'bin'}:{environ.get('PATH', '')}",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_DOCS": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the environment's path, making it first where needed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--version", default=VERSION, help="of LiteLLM")
    options = parser.parse_args(arguments)
    try:
        print(install(options.version))
    except PeerError as error:
        print(f"bench.transport.peer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
