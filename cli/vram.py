"""`omniserve vram`: who holds how much memory, who was denied and why."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from cli import http
from cli.errors import CliError, Exit
from cli.terminal import console, make_table, note, print_table
from cli.vram_view import TABLES, trouble

if TYPE_CHECKING:
    from typing import Any

    import httpx

    from cli.settings import CliSettings

_EVERY_S = 2.0


def run(url: str, settings: CliSettings, *, as_json: bool, watch: bool) -> Exit:
    """Show the broker's account. Returns 1 when a device's memory is not known; raises CliError."""
    key = settings.api_key.get_secret_value()
    headers = {"Authorization": f"Bearer {key}"} if key else None
    with http.new_client(connect_s=settings.connect_timeout_s, headers=headers) as client:
        if watch:
            return _watch(client, url)
        state = http.get_object(client, f"{url}/v1/gpu/vram")
    if as_json:
        print(json.dumps(state, indent=2))
    else:
        for place, (header, rows) in enumerate(_shown(state)):
            if place:
                print()
            print_table(header, rows)
    problem = trouble(state)
    if problem is not None:
        note(f"omniserve: {problem}")
    return Exit.OK if problem is None else Exit.FAILED


def _shown(state: dict[str, Any]) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Return the tables that have lines; devices are always shown."""
    tables = [(header, rows(state)) for header, rows in TABLES]
    return [tables[0], *(table for table in tables[1:] if table[1])]


def _watch(client: httpx.Client, url: str) -> Exit:
    """Show the tables anew every two seconds until Ctrl-C; a mesh that stops answering is waited for."""
    from rich.console import Group  # noqa: PLC0415  only a watcher needs it
    from rich.live import Live  # noqa: PLC0415  as above
    from rich.text import Text  # noqa: PLC0415  as above

    try:
        with Live(console=console(), auto_refresh=False) as live:
            while True:
                try:
                    state = http.get_object(client, f"{url}/v1/gpu/vram")
                    tables = [make_table(header, rows) for header, rows in _shown(state)]
                    live.update(Group(*tables, Text(trouble(state) or "all is well")), refresh=True)
                except CliError as error:
                    live.update(Text(error.message), refresh=True)
                time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return Exit.OK
