"""Lease device memory from OmniServe Mesh.

with LeaseClient("127.0.0.1:8792", tenant="trainer") as broker, broker.lease(4096) as lease:
...  # lease.mib may be allocated on lease.device
"""

from omniserve_client.aio import AsyncLease, AsyncLeaseClient
from omniserve_client.blocking import Lease, LeaseClient
from omniserve_client.terms import LeaseDeniedError, LeaseLostError, Tier

__all__ = [
    "AsyncLease",
    "AsyncLeaseClient",
    "Lease",
    "LeaseClient",
    "LeaseDeniedError",
    "LeaseLostError",
    "Tier",
]
