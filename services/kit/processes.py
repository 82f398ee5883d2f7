"""Processes that others can tell from their successors: to know that one is dead, and never to think so wrongly.

A process is identified by the machine's boot, the process namespace (a container has its own), its number and its
start. Only Linux says all four; elsewhere an identity is empty, and nobody is ever known to be dead.
"""

import hashlib
import re
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_IDENTITY = re.compile(r"([0-9a-f]{16})\.([0-9]{1,10})\.([0-9]{1,20})")


def own_identity() -> str:
    """Return this process's identity, or "" where there is none to be had."""
    with suppress(OSError, ValueError):
        pid = int((_PROC / "self").readlink().name)
        state, start = _stat(pid)
        return f"{_world()}.{pid}.{start}" if state else ""
    return ""


def is_dead(identity: str) -> bool:
    """Return True only if the process certainly runs no more; one that cannot be seen from here may be alive."""
    known = _IDENTITY.fullmatch(identity)
    try:
        if known is None or known[1] != _world():
            return False
        if not (_PROC / known[2]).exists():
            return True
        state, start = _stat(int(known[2]))
    except (OSError, ValueError):
        return False
    return start != known[3] or state in {"Z", "X"}


def _world() -> str:
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    namespace = (_PROC / "self/ns/pid").readlink()
    return hashlib.sha256(f"{boot}/{namespace}".encode()).hexdigest()[:16]


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state and its start in clock ticks since boot. Raises OSError, ValueError."""
    # The name, in parentheses, may itself hold spaces and parentheses.
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError(f"/proc/{pid}/stat ends early")
    return fields[0], fields[19]
