"""Work that is carried to its end although who asked for it may leave."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from services.kit.errors import DomainError
from services.kit.owner import Owner

T = TypeVar("T")


async def to_its_end(owner: Owner, work: Coroutine[Any, Any, T], *, name: str) -> T:
    """Return the result of work, or raise its DomainError. It goes on when this is cancelled."""
    outcome = await asyncio.shield(owner.start(_outcome(work), name=name))
    if isinstance(outcome, DomainError):
        raise outcome
    return outcome


async def _outcome(work: Coroutine[Any, Any, T]) -> T | DomainError:
    """Return the result of work, or why it failed: a task of the owner must not end by an exception."""
    try:
        return await work
    except DomainError as error:
        return error
