"""Processes under measurement: started in a group of their own, watched through /proc, always ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHECKOUT = Path(__file__).resolve().parents[1]
STOP_LIMIT_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def stop_children_on_signal() -> None:
    """Let SIGTERM unwind the program as Ctrl-C does, so that no measured server outlives its bench."""

    def unwind(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [holder.getsockname()[1] for holder in holders]


class Child:
    """One program of a bench, with its output in a log file; use as a context manager."""

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str], log: Path, cwd: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=dict(environ),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise with the log's tail when the program has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.returncode}:\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """Last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Ask it to end (SIGTERM); what is left of its group after 30 s is killed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def family(pid: int) -> list[int]:
    """`pid` and all its living descendants."""
    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def command_line(pid: int) -> list[str]:
    """Arguments a process was started with; empty when it is gone."""
    try:
        return [
            part.decode(errors="replace") for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if part
        ]
    except OSError:
        return []


def cpu_seconds(pid: int) -> float:
    """User and system seconds of all threads of a process so far; 0 when it is gone. Resolution: one clock tick."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def machine_busy_seconds() -> float:
    """Seconds all cores together have not been idle, including what a hypervisor took."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S
