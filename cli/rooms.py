"""The settings of every room of the mesh, as this shell's environment has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cli.settings import CliSettings
from services.kit.settings import ServiceSettings, SettingsError, check_environment, known_variables, load
from services.kit.settings_docs import discover

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True)
class Rooms:
    """The settings by room; a room with a bad value has its defaults. `problems`: kit's sentences."""

    cli: CliSettings
    by_name: Mapping[str, ServiceSettings]
    problems: tuple[str, ...] = ()

    def value(self, room: str, name: str, default: object) -> object:
        """Return one knob, or `default` when the room or the knob does not exist."""
        return getattr(self.by_name.get(room), name, default)

    def listens(self) -> dict[str, str]:
        """Return where each service listens, host:port."""
        found = {name: getattr(settings, "listen", None) for name, settings in self.by_name.items()}
        return {name: address for name, address in sorted(found.items()) if isinstance(address, str)}


def load_rooms(environ: Mapping[str, str]) -> Rooms:
    """Read every room's settings."""
    classes = discover()
    known = known_variables(*classes)
    # A name that nobody knows is a problem of its own; the others still say what the mesh would run with.
    readable = {name: value for name, value in environ.items() if name in known}
    rooms = {cls.service: _load(cls, readable) for cls in classes}
    cli = _load(CliSettings, readable)
    try:
        check_environment(classes, environ)
    except SettingsError as error:
        return Rooms(cli, rooms, error.problems)
    return Rooms(cli, rooms)


def _load(cls: type[S], environ: Mapping[str, str]) -> S:
    try:
        return load(cls, environ)
    except SettingsError:
        return cls()
