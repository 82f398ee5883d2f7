"""Small pieces of Envoy's configuration, as plain nodes. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

Node: TypeAlias = "str | int | float | bool | list[Node] | dict[str, Node] | None"
Tree: TypeAlias = "dict[str, Node]"

TYPES: Final = "type.googleapis.com/"
MIB: Final = 1024 * 1024
GATE: Final = "gate"
"""The cluster that leads into the internal listener with ext_proc."""

TIER: Final = "x-omniserve-tier"
ROUTE: Final = "x-omniserve-route"
ASK: Final = "x-omniserve-ask"
ADMITTED: Final = "x-omniserve-admitted"
OVERFLOW: Final = "x-omniserve-overflow"
MODE: Final = "x-om-mode"
"""Where the mesh listener keeps x-omniserve-mode: `try` wants a permit at once or none."""
REFUSES: Final = "x-omniserve-mode"
"""`try` tells the facade that another group serves what it cannot take at once."""
INTERNAL: Final = "x-omniserve-internal"
ORIGINAL_PATH: Final = "x-envoy-original-path"
WORKERS_NEVER_SEE: Final = (
    TIER,
    ROUTE,
    ASK,
    ADMITTED,
    REFUSES,
    "x-omniserve-client",
    "x-omniserve-listener",
    "x-omniserve-service-token",
    ORIGINAL_PATH,
    "x-envoy-external-address",
)
"""What the mesh says to itself. Callers' own copies of such headers never pass the listeners."""

FACTS: Final = "omniserve"
"""Namespace of what an endpoint's metadata says about it."""


@dataclass(frozen=True, slots=True)
class DoorFacts:
    """What routes must know of the static half. `operator_origins`: a regular expression; `ca`: the authorities' file.

    `checks_everybody`: admission is asked about callers also while there are no keys. `hold_retries`: how often a request is
    tried again that a restarting service has not seen.
    """

    operator_hosts: tuple[str, ...]
    operator_origins: str
    body_limit_mib: int
    stream_idle_timeout_s: int
    checks_everybody: bool
    ca: str
    hold_retries: int = 120


def typed(name: str, **fields: Node) -> Tree:
    """Return a message of an extension."""
    return {"@type": f"{TYPES}{name}", **fields}


def seconds(milliseconds: int) -> str:
    """Return a duration as Envoy writes it."""
    return f"{milliseconds // 1000}.{milliseconds % 1000:03d}s" if milliseconds % 1000 else f"{milliseconds // 1000}s"


def literal(value: str) -> str:
    """Return a header's value that Envoy takes as it is: a percent sign would begin a substitution."""
    return value.replace("%", "%%")


def header(name: str, value: str, *, if_absent: bool = False) -> Node:
    """Return a header to add. `value` may hold substitutions. It replaces what is there, unless it is `if_absent`."""
    action = "ADD_IF_ABSENT" if if_absent else "OVERWRITE_IF_EXISTS_OR_ADD"
    return {"header": {"key": name, "value": value}, "append_action": action}


def headers(values: Mapping[str, str]) -> list[Node]:
    """Return headers to add with values to take as they are."""
    return [header(name, literal(value)) for name, value in values.items()]


def is_exactly(name: str, value: str) -> Tree:
    """Return a match on a header's whole value."""
    return {"name": name, "string_match": {"exact": value}}


def fits(name: str, regex: str) -> Tree:
    """Return a match of a header's whole value against a regular expression."""
    return {"name": name, "string_match": {"safe_regex": {"regex": regex}}}


def unless(match: Tree) -> Tree:
    """Return the opposite of a match."""
    return {**match, "invert_match": True}


def asks_for_tier(tiers: Iterable[str]) -> Tree:
    """Return a match on the tier, as services read it."""
    return fits(TIER, rf"(?i)\s*({'|'.join(tiers)})\s*")


def refusal(match: Tree, status: int, sentence: str) -> Tree:
    """Return a route that Envoy answers itself."""
    return {"match": match, "direct_response": {"status": status, "body": {"inline_string": sentence}}}


def too_large(match: Tree, limit_mib: int) -> Tree:
    """Return a route that refuses a declared length above the limit before a byte of the body is read."""
    above: Node = {"start": limit_mib * MIB + 1, "end": 2**63 - 1}
    declared = match.get("headers", [])
    assert isinstance(declared, list)  # noqa: S101 - made here
    lengths: list[Node] = [*declared, {"name": "content-length", "range_match": above}]
    sentence = f"The request body is larger than the limit of {limit_mib} MiB."
    return refusal({**match, "headers": lengths}, 413, sentence)
