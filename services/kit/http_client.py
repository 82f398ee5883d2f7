"""httpx, without its command line, whose libraries cost half of what importing httpx does."""

from services.kit.lean import without

with without("click", "pygments", "rich"):
    import httpx

__all__ = ["httpx"]
