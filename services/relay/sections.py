"""The sections `upstreams` and `routes` of omniserve.yaml as they are written."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Tier = Literal["paid", "sub", "free", "background"]
Status = Annotated[int, Field(ge=400, le=599)]


class Section(BaseModel):
    """A part of the file: nothing unknown, frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class EndpointSection(Section):
    """An endpoint with a share of its own."""

    address: str
    weight: int = Field(default=1, ge=1, le=128)


class CredentialSection(Section):
    """What an upstream wants from us: a header whose value is in a variable or a file, never in this file."""

    header: str = Field(default="authorization", pattern=r"^[A-Za-z0-9-]{1,64}$")
    prefix: str = Field(default="", max_length=64, pattern=r"^[\x20-\x7e]*$")
    env: str | None = Field(default=None, min_length=1)
    file: Path | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError("needs one of `env` (a variable's name) and `file`")
        return self


class GroupSection(Section):
    """A group of endpoints."""

    endpoints: tuple[str | EndpointSection, ...] = ()
    tiers: tuple[Tier, ...] | Literal["all"] | None = None
    credential: CredentialSection | None = None
    ca: Path | None = None
    min_free_mib: int | None = Field(default=None, ge=0)


class UpstreamSection(Section):
    """A worker API. `endpoints` is short for those of its main group."""

    endpoints: tuple[str | EndpointSection, ...] = ()
    local: GroupSection | None = None
    overflow: GroupSection | None = None
    managed: GroupSection | None = None
    permits: int | None = Field(default=None, ge=0, le=4096)
    timeout_ms: int | None = Field(default=None, ge=1, le=86_400_000)
    idle_timeout_ms: int | None = Field(default=None, ge=1, le=86_400_000)
    max_body_mib: int | None = Field(default=None, ge=1, le=90)
    model: str | None = Field(default=None, max_length=128)
    prefer_embedded: bool | None = None
    health_path: str | None = None
    reuse_connections: bool | None = None
    replay_statuses: tuple[Status, ...] | None = None


class UpstreamsSection(Section):
    """Every upstream by name; `default` serves every modality that has none of its own."""

    default: UpstreamSection | None = None
    llm: UpstreamSection | None = None
    image: UpstreamSection | None = None
    image_worker: UpstreamSection | None = None
    birefnet: UpstreamSection | None = None
    tts: UpstreamSection | None = None
    stt: UpstreamSection | None = None
    forecast: UpstreamSection | None = None
    embedding: UpstreamSection | None = None
    multimodal: UpstreamSection | None = None
    animation: UpstreamSection | None = None
    three_d: UpstreamSection | None = None
    aux: UpstreamSection | None = None
    training: UpstreamSection | None = None
    h3: UpstreamSection | None = None


class RouteSection(Section):
    """What is changed about a route."""

    upstream_path: str | None = None
    tier: Tier | None = None
    paying_tiers: tuple[Tier, ...] | None = None
    timeout_ms: int | None = Field(default=None, ge=1, le=86_400_000)
    headers: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")], Annotated[str, Field(pattern=r"^[\x20-\x7e]*$")]
    ] = {}
