"""httpx when it is used, without its command line, whose libraries cost half of what importing httpx does."""

from typing import TYPE_CHECKING

from services.kit.lean import Later

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
else:
    httpx = Later("httpx", "click", "pygments", "rich")

__all__ = ["OnDemand", "httpx"]


class OnDemand:
    """A client that is made when it is first used: making one reads the authorities of the whole web."""

    def __init__(self, make: "Callable[[], httpx.AsyncClient]") -> None:
        self._make = make
        self._client: httpx.AsyncClient | None = None

    def __call__(self) -> "httpx.AsyncClient":
        """Return the client."""
        if self._client is None:
            self._client = self._make()
        return self._client

    async def aclose(self) -> None:
        """Close its connections, if there is one."""
        if self._client is not None:
            await self._client.aclose()
