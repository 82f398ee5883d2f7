"""Settings of vram: every knob once."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.kit.config import Document, config_knob
from services.kit.settings import Address, MeshSettings, knob
from services.vram.core.model import Rules

_MOST_MIB: Final = 2**31


class ReserveEntry(BaseModel):
    """One entry of `reserves` in omniserve.yaml: growth that a co-tenant will take and has not taken yet."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=128)]
    mib: Annotated[int, Field(ge=1, le=_MOST_MIB)]
    device: str = ""


class VramSettings(MeshSettings):
    """What the owner of the box can set."""

    service: ClassVar[str] = "vram"

    listen: Address = knob("127.0.0.1:9102", "Where the service listens.")
    broker: bool = knob(
        True,  # noqa: FBT003 - the default
        "Whether memory is leased at all; off denies every ask.",
    )
    keep_free_mb: int = knob(
        1024,
        "Floor for allocations without a lease: paid leases may use all of it, sub half, free a quarter, background none.",
        unit="MiB",
        ge=0,
        le=_MOST_MIB,
    )
    lease_ttl_s: int = knob(120, "How long a lease lasts unless it is renewed.", unit="s", ge=1, le=86_400)
    max_ttl_s: int = knob(3600, "Longest time that a lease may ask for.", unit="s", ge=1, le=86_400)
    reserve: tuple[str, ...] = knob(
        (),
        "Growth that co-tenants will take and have not taken yet, as `name:mib` or `name:mib@device`, separated by commas.",
    )
    devices: Literal["auto", "nvml", "host"] = knob(
        "auto", "Whose memory is leased: the NVIDIA driver's devices, or the host's RAM; `auto` looks for a driver."
    )
    driver_limit_s: float = knob(
        2.0, "How long the driver may take to answer before what is free counts as unknown.", unit="s", gt=0, le=60
    )
    fresh_s: float = knob(0.25, "How old the driver's figures may be when a lease is granted.", unit="s", ge=0, le=60)
    trust_pids: bool = knob(
        True,  # noqa: FBT003 - the default
        "Whether a lease's process id means the same process here: off where tenants live in containers of their own.",
    )
    ram_prefetch_enabled: bool = knob(
        True,  # noqa: FBT003 - the default
        "Whether weights that services name are read ahead into the page cache.",
        aliases=("OMNISERVE_RAM_PREFETCH_ENABLED",),
    )
    ram_keep_free_pct: int = knob(
        5,
        "Share of the host's RAM that must stay available; reading ahead stops there.",
        unit="%",
        aliases=("OMNISERVE_RAM_KEEP_FREE_PCT",),
        ge=0,
        le=100,
    )
    warm_dirs: tuple[Path, ...] = knob(
        (), "Folders whose files may be kept warm, separated by commas; empty: any that a service names."
    )
    config: Path | None = config_knob()

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.lease_ttl_s > self.max_ttl_s:
            raise ValueError(
                f"OMNISERVE_VRAM_LEASE_TTL_S is {self.lease_ttl_s} s, longer than OMNISERVE_VRAM_MAX_TTL_S, {self.max_ttl_s} s"
            )
        for text in self.reserve:
            _reserve(text)
        return self

    def reserves(self, document: Document, first: str) -> tuple[ReserveEntry, ...]:
        """Return the declared growth with a device each, `first` by default; the variable wins over the file.

        Raises ConfigError.
        """
        listed: tuple[ReserveEntry, ...] = tuple(_reserve(text) for text in self.reserve)
        if not listed:
            listed = tuple(document.section("reserves", list[ReserveEntry]) or ())
        return tuple(each.model_copy(update={"device": each.device or first}) for each in listed)

    def rules(self, reserves: tuple[ReserveEntry, ...]) -> Rules:
        """Return the policy."""
        return Rules(
            keep_free_mib=self.keep_free_mb,
            default_ttl_s=self.lease_ttl_s,
            max_ttl_s=self.max_ttl_s,
            reserved_mib=_by_device(reserves),
            enabled=self.broker,
        )


def _by_device(reserves: tuple[ReserveEntry, ...]) -> Mapping[str, int]:
    sums: dict[str, int] = {}
    for each in reserves:
        sums[each.device] = sums.get(each.device, 0) + each.mib
    return MappingProxyType(sums)


def _reserve(text: str) -> ReserveEntry:
    name, _, rest = text.rpartition(":")
    mib, _, device = rest.partition("@")
    if not name or not mib.isdecimal() or not 1 <= int(mib) <= _MOST_MIB:
        raise ValueError(f"OMNISERVE_VRAM_RESERVE: {text!r} is not name:mib or name:mib@device")
    return ReserveEntry(name=name, mib=int(mib), device=device)
