"""What `python -m deploy.edge` left about the static half of the front door."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import yaml

from services.kit.yaml_text import from_text
from services.relay.core.render_nodes import DoorFacts, Tree


class DoorError(Exception):
    """The static half is not there or not readable; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Door:
    """The static half: facts for routes, Envoy's configuration, and the program that judges the whole."""

    facts: DoorFacts
    static: Tree
    envoy: str


def read_door(state_dir: Path) -> Door:
    """Return the static half of `<state>/envoy`. Raises DoorError."""
    folder = state_dir / "envoy"
    try:
        known: dict[str, Any] = json.loads((folder / "door.json").read_text(encoding="utf-8"))
        static = cast("Tree", from_text((folder / "envoy.yaml").read_text(encoding="utf-8")))
        facts = {field.name: known[field.name] for field in fields(DoorFacts)}
        facts["operator_hosts"] = tuple(facts["operator_hosts"])
        return Door(DoorFacts(**facts), static, str(known["envoy"]))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise DoorError(f"{folder} is not what `python -m deploy.edge` writes; run it: {error}") from error
