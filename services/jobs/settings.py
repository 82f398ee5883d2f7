"""Settings of jobs: every knob once."""

from typing import ClassVar, Final

from services.jobs.core.responses import Bounds
from services.kit.settings import Address, MeshSettings, knob

_MIB: Final = 1024 * 1024
_DAY_MS: Final = 24 * 60 * 60 * 1000


class JobsSettings(MeshSettings):
    """What the owner of the box can set."""

    service: ClassVar[str] = "jobs"

    listen: Address = knob("127.0.0.1:9107", "Where jobs listens.")
    responses_ttl_days: float = knob(
        30.0, "How long a response of `/v1/responses` is kept.", unit="days", gt=0, le=3650
    )
    response_limit_mib: int = knob(
        16, "Largest response with its input that is kept; larger ones need `store: false`.", unit="MiB", ge=1, le=90
    )
    responses_total_mib: int = knob(
        1024, "All kept responses together; the oldest make room for new ones.", unit="MiB", ge=90
    )

    def bounds(self) -> Bounds:
        """Return the bounds of stored responses."""
        return Bounds(
            ttl_ms=int(self.responses_ttl_days * _DAY_MS),
            response_bytes=self.response_limit_mib * _MIB,
            total_bytes=self.responses_total_mib * _MIB,
        )
