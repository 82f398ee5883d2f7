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
    reclaim_id: str = ""
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
            reclaimable=self.terms.reclaimable,
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

    def asked_back(self, event: pb.WatchResponse) -> tuple[str, str, int] | None:
        """Return the request's id, the device and how much is asked back, MiB; None when the event is about no such thing."""
        if event.HasField("reclaim_requested"):
            asked = event.reclaim_requested
            return (asked.reclaim_id, asked.device, asked.size_mib) if asked.lease_id == self.lease_id else None
        if event.HasField("snapshot"):  # what was asked while nobody listened: how much is not said any more
            for lease in event.snapshot.leases:
                if lease.lease_id == self.lease_id and lease.HasField("reclaim_id"):
                    device, mib = next(iter(self.sizes.items()))
                    return lease.reclaim_id, device, mib
        return None

    def answer(self, reclaim_id: str, device: str, keeps_mib: int | None) -> pb.RenewRequest:
        """Return the answer to a request: None gives nothing back; 0 all, by ending the lease; anything between shrinks it.

        Raises ValueError for more than is held.
        """
        if keeps_mib is None:
            return _answer(self.lease_id, reclaim_id, pb.RECLAIM_ANSWER_BUSY)
        if not 0 <= keeps_mib <= self.sizes[device]:
            raise ValueError(f"{keeps_mib} MiB are to be kept of {self.sizes[device]} on {device}")
        self.reclaim_id = reclaim_id
        if keeps_mib == 0:
            return _answer(self.lease_id, reclaim_id, pb.RECLAIM_ANSWER_WORKING)
        self.sizes[device] = keeps_mib
        if device in self.allocated:
            self.allocated[device] = min(keeps_mib, self.allocated[device])
        request = _answer(self.lease_id, reclaim_id, pb.RECLAIM_ANSWER_FREED)
        request.items.add(device=device, size_mib=keeps_mib, materialised_mib=self.allocated.get(device))
        return request

    def end(self) -> pb.ReleaseRequest:
        """Return the request that gives the lease back."""
        return pb.ReleaseRequest(lease_id=self.lease_id, reclaim_id=self.reclaim_id or None)

    def lose(self, why: str) -> None:
        """Take note that it is over; only the first reason counts."""
        if not self.is_lost:
            self.is_lost, self.why_lost = True, why


def _answer(lease_id: str, reclaim_id: str, answer: "pb.ReclaimAnswer.ValueType") -> pb.RenewRequest:
    return pb.RenewRequest(lease_id=lease_id, reclaim_id=reclaim_id, reclaim_answer=answer)


def hold(terms: Terms, response: pb.LeaseResponse, sent_at: float) -> Hold:
    """Return the state of a lease that was granted."""
    sizes = {item.device: item.size_mib for item in response.items}
    return Hold(terms, response.lease_id, sizes, response.ttl_s, sent_at, pid=terms.pid)
