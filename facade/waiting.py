"""Answers that are waited for only as long as somebody wants them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive

from services.kit.errors import DomainError, Reason
from services.kit.owner import Owner


@contextmanager
def while_connected(owner: Owner, receive: Receive) -> Iterator[None]:
    """Cancel the block as soon as the caller hangs up, and raise DomainError `cancelled` instead.

    The body must have been read.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine runs in one
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = owner.start(watch(), name="watch for the caller's hanging up")
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise DomainError(Reason.CANCELLED, "The caller has gone.") from None
        raise
    finally:
        watcher.cancel()
