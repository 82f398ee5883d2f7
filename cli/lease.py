"""`omniserve lease`: runs a program under a lease of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import grpc

from cli.errors import CliError, Exit
from cli.http import START_HINT
from cli.terminal import note, one_line
from omniserve_client import LeaseClient, LeaseDeniedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from cli.settings import CliSettings
    from omniserve_client import Lease, Tier

_FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)
# What terminals send to the whole group themselves.
_FROM_TERMINALS: Final = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})
_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126
_SIGNALLED: Final = 128
# What `sysexits.h` calls a failure that may be gone later.
DENIED: Final = 75


@dataclass(frozen=True)
class Wish:
    """What to lease: MiB, seconds."""

    mib: int
    min_mib: int | None
    device: str | None
    tier: Tier | None
    ttl_s: int | None
    wait_s: float
    purpose: str
    tenant: str
    reclaim: bool


def run(url: str, wish: Wish, command: Sequence[str], settings: CliSettings) -> int:
    """Run the command under a lease; return its exit status, 128 + N when signal N ended it, 75 when there is no room.

    Raises CliError when the broker cannot be asked or the command cannot be started.
    """
    key = settings.api_key.get_secret_value() or None
    target, patience_s = urlsplit(url).netloc, settings.connect_timeout_s
    with LeaseClient(target, tenant=wish.tenant, token=key, patience_s=patience_s) as broker:
        try:
            lease = _leased(broker, wish)
        except LeaseDeniedError as denied:
            note(f"omniserve: no room: {one_line(denied.message)}")
            return DENIED
        except grpc.RpcError as error:
            raise _unanswered(url, error) from error
        with lease:
            note(f"omniserve: {lease.mib} MiB leased on {', '.join(lease.sizes)}")
            return _run(command, lease)


def _leased(broker: LeaseClient, wish: Wish) -> Lease:
    return broker.lease(
        wish.mib,
        min_mib=wish.min_mib,
        device=wish.device,
        tier=wish.tier,
        ttl_s=wish.ttl_s,
        wait_s=wish.wait_s,
        purpose=wish.purpose,
        reclaim=wish.reclaim,
        on_lost=_tell_lost,
    )


def _tell_lost(lease: Lease) -> None:
    """Say that the lease is over; the command goes on, at its own risk."""
    note(
        f"omniserve: the lease of {lease.mib} MiB is LOST: what it allowed may be given to others; the command goes on"
    )


def _run(command: Sequence[str], lease: Lease) -> int:
    try:
        process = subprocess.Popen(list(command))
    except FileNotFoundError:
        note(f"omniserve: {command[0]}: there is no such command")
        return _NOT_FOUND
    except OSError as error:
        note(f"omniserve: {command[0]}: {error.strerror}")
        return _NOT_EXECUTABLE
    lease.set_pid(process.pid)
    with _forwarding(process):
        status = process.wait()
    return _SIGNALLED - status if status < 0 else status


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to the command instead of ending by them; what a terminal has sent to it already is not sent twice."""

    def forward(number: int, _frame: FrameType | None) -> None:
        if not (signal.Signals(number) in _FROM_TERMINALS and _has_terminal()):
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_terminal() -> bool:
    """Return whether this process is in the foreground of a terminal."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _unanswered(url: str, error: grpc.RpcError) -> CliError:
    said = one_line(f"{error.code().name.lower()}: {error.details()}")
    if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
        return CliError(f"the memory broker does not answer at {url} ({said}): {START_HINT}")
    return CliError(said, code=Exit.USAGE if error.code() is grpc.StatusCode.INVALID_ARGUMENT else Exit.FAILED)
