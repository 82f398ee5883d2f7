"""A lease as its holder sees it: how long it is certain, when it is renewed, when it is lost. Time is an argument."""

from dataclasses import dataclass, field
from typing import Final

from omniserve.vram.v1 import vram_pb2 as pb
from omniserve_client.terms import Terms

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0


@dataclass(slots=True)
class Hold:
    """The state of a lease. Its TTL counts from when the last call that succeeded was *sent*: never later than the broker's."""

    terms: Terms
    lease_id: str
    sizes: dict[str, int]
    ttl_s: float
    since: float
    is_lost: bool = False
    why_lost: str = ""
    allocated: dict[str, int] = field(default_factory=dict)
    pid: int | None = None
    _failures: int = 0

    def next_renewal_in(self, now: float) -> float:
        """Return the seconds until the next renewal: a third of the TTL, or a growing pause after a failure."""
        if self._failures:
            pause = min(FIRST_PAUSE_S * 2.0 ** (self._failures - 1), LONGEST_PAUSE_S)
            return max(0.0, min(pause, self.since + self.ttl_s - now))
        return max(0.0, self.since + self.ttl_s / 3 - now)

    def time_limit(self, now: float) -> float:
        """Return how long a renewal may take: no longer than the lease is certain."""
        return max(0.05, min(self.ttl_s / 3, self.since + self.ttl_s - now))

    def renewal(self) -> pb.RenewRequest:
        """Return the request that renews it."""
        items = [pb.RenewItem(device=device, materialised_mib=mib) for device, mib in self.allocated.items()]
        return pb.RenewRequest(lease_id=self.lease_id, items=items, pid=self.pid)

    def renewed(self, response: pb.RenewResponse, sent_at: float) -> None:
        """Take note of a renewal that succeeded."""
        self._failures = 0
        self.since = sent_at
        self.ttl_s = response.lease.ttl_s

    def failed(self, why: str, now: float) -> bool:
        """Take note of a renewal that nobody answered; return whether the lease is lost by now."""
        self._failures += 1
        if now >= self.since + self.ttl_s:
            self.lose(f"it could not be renewed within its TTL of {self.ttl_s:g} s: {why}")
        return self.is_lost

    def again(self) -> pb.LeaseRequest:
        """Return the request that asks anew for what the broker has forgotten: the same devices and sizes."""
        terms = Terms(
            tenant=self.terms.tenant,
            sizes=self.sizes,
            tier=self.terms.tier,
            ttl_s=self.terms.ttl_s,
            purpose=self.terms.purpose,
            pid=self.pid,
        )
        return terms.request(self.allocated, wait=False)

    def regained(self, response: pb.LeaseResponse, sent_at: float) -> bool:
        """Take the answer to `again`; return whether the lease goes on, under another id."""
        if not response.granted:
            self.lose(f"the broker does not know it any more, and denied another: {response.denied.message}")
            return False
        self._failures = 0
        self.lease_id, self.since, self.ttl_s = response.lease_id, sent_at, response.ttl_s
        return True

    def lose(self, why: str) -> None:
        """Take note that it is over; only the first reason counts."""
        if not self.is_lost:
            self.is_lost, self.why_lost = True, why


def hold(terms: Terms, response: pb.LeaseResponse, sent_at: float) -> Hold:
    """Return the state of a lease that was granted."""
    sizes = {item.device: item.size_mib for item in response.items}
    return Hold(terms, response.lease_id, sizes, response.ttl_s, sent_at, pid=terms.pid)
