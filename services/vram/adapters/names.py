"""Names of processes, for people."""

from pathlib import Path


def name_of(pid: int) -> str:
    """Return a process's name; empty when it cannot be read."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
