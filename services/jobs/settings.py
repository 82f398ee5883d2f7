"""Settings of jobs: every knob once."""

from typing import ClassVar, Final

from pydantic import field_validator

from services.jobs.core.images import ImageBounds
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

    public_base: str = knob(
        "http://127.0.0.1:8791",
        "Where callers reach the front door: what URLs of pictures begin with. `make run` fills in its own port.",
        aliases=("OMNISERVE_PUBLIC_BASE",),
    )
    image_ttl_s: int = knob(
        3600, "How long a picture asked for as a URL is kept.", unit="s", ge=1, le=365 * 24 * 60 * 60
    )
    image_limit_mib: int = knob(64, "Largest picture that is kept.", unit="MiB", ge=1, le=90)
    images_total_mib: int = knob(
        1024, "All kept pictures together; the oldest make room for new ones.", unit="MiB", ge=90
    )

    @field_validator("public_base")
    @classmethod
    def _is_base(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")) or any(each in value for each in "?#"):
            raise ValueError(f"is no base of URLs: write http://host:port or https://host, not {value!r}")
        return value

    def sweep_s(self) -> float:
        """Return how often pictures that are over are removed, seconds."""
        return min(60.0, max(1.0, self.image_ttl_s / 4))

    def image_bounds(self) -> ImageBounds:
        """Return the bounds of kept pictures."""
        return ImageBounds(
            ttl_ms=self.image_ttl_s * 1000,
            image_bytes=self.image_limit_mib * _MIB,
            total_bytes=self.images_total_mib * _MIB,
        )

    def bounds(self) -> Bounds:
        """Return the bounds of stored responses."""
        return Bounds(
            ttl_ms=int(self.responses_ttl_days * _DAY_MS),
            response_bytes=self.response_limit_mib * _MIB,
            total_bytes=self.responses_total_mib * _MIB,
        )
