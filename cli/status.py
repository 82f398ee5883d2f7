"""`omniserve status`: what runs, how busy it is, and whether all is well."""

from __future__ import annotations

import ipaddress
import json
import os
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cli import http
from cli.errors import CliError, Exit
from cli.rooms import load_rooms
from cli.status_view import HEADER, Answer, rows, trouble
from cli.terminal import console, make_table, note, print_table
from services.kit.http_client import httpx

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cli.settings import CliSettings

_EVERY_S = 2.0
# The public front door may keep /status to callers with a key; /health is for everybody.
_NOT_FOR_US = frozenset({401, 403, 404})


@dataclass(frozen=True)
class Look:
    """One look at the mesh. `status` is empty when this caller may see its health only."""

    url: str
    health: Answer
    status: Answer


def run(urls: list[str], settings: CliSettings, *, as_json: bool, watch: bool) -> Exit:
    """Show the state of the mesh behind the first of `urls` that answers. Returns 1 when it is degraded; raises CliError."""
    with _client(settings) as client:
        if watch:
            return _watch(client, urls)
        look = look_at(client, urls)
    if as_json:
        print(json.dumps(look.status or look.health, indent=2))
    else:
        print_table(HEADER, rows(look.url, look.health, look.status, _addresses(look.url)))
    problem = trouble(look.health, look.status)
    if problem is not None:
        note(f"omniserve: {problem}")
    return Exit.OK if problem is None else Exit.FAILED


def look_at(client: httpx.Client, urls: list[str]) -> Look:
    """Ask the first front door that answers. Raises CliError when none does, or when what answers is no mesh."""
    *others, last = urls
    for url in others:
        try:
            return _ask(client, url)
        except httpx.TransportError:
            continue  # not published here, or not running: the next one will tell
    try:
        return _ask(client, last)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise http.not_running(last, error) from error


def _ask(client: httpx.Client, url: str) -> Look:
    health = _get(client, f"{url}/health")
    status = _get(client, f"{url}/status", optional=True)
    return Look(url, health, status)


def _get(client: httpx.Client, url: str, *, optional: bool = False) -> Answer:
    answer = client.get(url)
    if optional and answer.status_code in _NOT_FOR_US:
        return {}
    if answer.status_code != httpx.codes.OK:
        raise http.refusal(answer.status_code, answer.content)
    return http.json_object(answer, url)


def _client(settings: CliSettings) -> httpx.Client:
    key = settings.api_key.get_secret_value()
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return http.new_client(connect_s=settings.connect_timeout_s, headers=headers)


@cache
def _addresses(url: str) -> Mapping[str, str]:
    """Return where services listen: known from the settings while the mesh runs on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return load_rooms(os.environ).listens() if local else {}


def _watch(client: httpx.Client, urls: list[str]) -> Exit:
    """Show the table anew every two seconds until Ctrl-C; a mesh that stops answering is waited for."""
    from rich.console import Group  # noqa: PLC0415  only a watcher needs it
    from rich.live import Live  # noqa: PLC0415  as above
    from rich.text import Text  # noqa: PLC0415  as above

    try:
        with Live(console=console(), auto_refresh=False) as live:
            while True:
                try:
                    look = look_at(client, urls)
                    table = make_table(HEADER, rows(look.url, look.health, look.status, _addresses(look.url)))
                    live.update(Group(table, Text(trouble(look.health, look.status) or "all is well")), refresh=True)
                except CliError as error:
                    live.update(Text(error.message), refresh=True)
                time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return Exit.OK
