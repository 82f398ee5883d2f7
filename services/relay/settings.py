"""Settings of relay: every scalar knob once; what is structured is in the sections `upstreams` and `routes` of the file."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import SecretStr, model_validator

from services.kit.config import config_knob, read
from services.kit.settings import Address, MeshSettings, body_limit_knob, knob
from services.relay.core.routes import ROUTES
from services.relay.inputs import assemble
from services.relay.sections import Tier

Addresses = tuple[str, ...]


def _upstream(name: str, what: str) -> Addresses:
    addresses: Addresses = knob(
        (),
        f"Where {what} is proxied to: http://host:port, several with commas; empty means nowhere.",
        aliases=(f"OMNISERVE_{name}_UPSTREAM",),
    )
    return addresses


def _overflow(name: str) -> Addresses:
    addresses: Addresses = knob(
        (),
        f"Where {name} requests go that the local worker cannot take: https://host, several with commas.",
        aliases=(f"OMNISERVE_{name}_OVERFLOW_UPSTREAM",),
    )
    return addresses


def _overflow_key(name: str) -> SecretStr | None:
    key: SecretStr | None = knob(
        None,
        f"Key shown to the {name} overflow as a bearer token; callers' keys never go there.",
        secret=True,
        aliases=(f"OMNISERVE_{name}_OVERFLOW_API_KEY",),
    )
    return key


def _path(name: str, what: str, default: str = "") -> str:
    path: str = knob(
        default, f"Path at the worker for {what}; empty means the public one.", aliases=(f"OMNISERVE_{name}",)
    )
    return path


def _embedded(name: str) -> bool:
    preferred: bool = knob(
        False,  # noqa: FBT003 - the default
        f"Whether the embedded engine serves {name} routes although an upstream is configured.",
        aliases=(f"OMNISERVE_{name}_PREFER_EMBEDDED",),
    )
    return preferred


class RelaySettings(MeshSettings):
    """What the owner of the box can set."""

    service: ClassVar[str] = "relay"

    listen: Address = knob("127.0.0.1:9105", "Where the service listens.")
    config: Path | None = config_knob()
    mesh_listener: Address = knob(
        "127.0.0.1:8793", "Envoy's listener for services of the mesh; Forward sends requests there."
    )
    endpoint_ttl_s: int = knob(
        60, "How long endpoints that a service has set last when it names no time itself.", unit="s", ge=1, le=86_400
    )
    stats_interval_s: float = knob(2.0, "How often Envoy's counters are read.", unit="s", gt=0, le=300)

    upstream: Addresses = knob(
        (), "The upstream of every modality that has none of its own.", aliases=("OMNISERVE_UPSTREAM",)
    )
    llm_upstream: Addresses = _upstream("LLM", "text generation")
    image_upstream: Addresses = _upstream("IMAGE", "the image API")
    image_worker_upstream: Addresses = _upstream(
        "IMAGE_WORKER", "the image worker's own API (/generate_image and others)"
    )
    birefnet_upstream: Addresses = _upstream("BIREFNET", "background removal")
    tts_upstream: Addresses = _upstream("TTS", "speech synthesis")
    stt_upstream: Addresses = _upstream("STT", "transcription")
    forecast_upstream: Addresses = _upstream("FORECAST", "forecasting")
    embedding_upstream: Addresses = _upstream("EMBEDDING", "embedding")
    multimodal_upstream: Addresses = _upstream("MULTIMODAL", "captioning, visual questions and voice chat")
    animation_upstream: Addresses = _upstream("ANIMATION", "animation")
    three_d_upstream: Addresses = _upstream("3D", "3D generation")
    aux_upstream: Addresses = _upstream("AUX", "what belongs to no other upstream")
    training_upstream: Addresses = _upstream("TRAINING", "fine-tuning")
    upstream_timeout_ms: int = knob(
        600_000,
        "Longest silence within an upstream's answer; when set, it also wins over what the file says.",
        unit="ms",
        aliases=("OMNISERVE_UPSTREAM_TIMEOUT_MS",),
        ge=1,
        le=86_400_000,
    )
    body_limit_mib: int = body_limit_knob("Largest request body of an upstream that the file says nothing else about.")
    upstream_idle: int | None = knob(
        None,
        "0 closes each connection to an upstream after its request; any other number keeps as many as were in use at once.",
        unit="connections",
        aliases=("OMNISERVE_UPSTREAM_IDLE",),
        ge=0,
    )

    image_overflow_upstream: Addresses = _overflow("IMAGE")
    image_overflow_api_key: SecretStr | None = _overflow_key("IMAGE")
    stt_overflow_upstream: Addresses = _overflow("STT")
    stt_overflow_api_key: SecretStr | None = _overflow_key("STT")
    tts_overflow_upstream: Addresses = _overflow("TTS")
    tts_overflow_api_key: SecretStr | None = _overflow_key("TTS")
    overflow_tiers: tuple[Tier, ...] = knob(
        ("paid",),
        "Tiers that may use an overflow; when set, it also wins over what the file says.",
        aliases=("OMNISERVE_OVERFLOW_TIERS",),
    )
    stt_local_first: bool = knob(
        False,  # noqa: FBT003 - the default
        "Whether the STT overflow is the fallback of every tier, also after the local worker's 429, 502, 503 and 504.",
        aliases=("OMNISERVE_STT_LOCAL_FIRST",),
    )
    stt_min_free_mib: int | None = knob(
        None,
        "With less free device memory the local STT worker is passed over; absent means never.",
        unit="MiB",
        aliases=("OMNISERVE_STT_MIN_FREE_MIB",),
        ge=0,
    )

    llm_prefer_embedded: bool = _embedded("LLM")
    embedding_prefer_embedded: bool = _embedded("EMBEDDING")
    image_prefer_embedded: bool = _embedded("IMAGE")
    birefnet_prefer_embedded: bool = _embedded("BIREFNET")
    tts_prefer_embedded: bool = _embedded("TTS")
    stt_prefer_embedded: bool = _embedded("STT")
    multimodal_prefer_embedded: bool = _embedded("MULTIMODAL")

    image_generate_path: str = _path("IMAGE_GENERATE_PATH", "image generations")
    tts_path: str = _path("TTS_PATH", "speech by the text generator's API")
    tts_openai_path: str = _path("TTS_OPENAI_PATH", "speech by OpenAI's API")
    stt_file_path: str = _path("STT_FILE_PATH", "transcriptions of an uploaded file")
    stt_url_path: str = _path("STT_URL_PATH", "transcriptions of a URL")
    stt_openai_path: str = _path("STT_OPENAI_PATH", "transcriptions by OpenAI's API")
    caption_path: str = _path("CAPTION_PATH", "image captions")
    forecast_path: str = _path("FORECAST_PATH", "/v1/forecasts")
    three_d_path: str = _path("3D_PATH", "3D generations")
    animation_path: str = _path("ANIMATION_PATH", "animations")
    three_d_model: str = knob("", "Name of the 3D worker's model in lists.", aliases=("OMNISERVE_3D_MODEL",))
    animation_model: str = knob(
        "", "Name of the animation worker's model in lists.", aliases=("OMNISERVE_ANIMATION_MODEL",)
    )

    h3_upstream: Addresses = _upstream("H3", "the paid video route, a service that places its requests itself,")
    h3_api_key: SecretStr | None = knob(
        None, "Our key for it, shown as a bearer token.", secret=True, aliases=("OMNISERVE_H3_API_KEY",)
    )
    h3_path: str = _path("H3_PATH", "the paid video route", "/predict-sync")
    h3_tiers: tuple[Tier, ...] = knob(
        ("paid",), "Tiers that may use it; others get 402.", aliases=("OMNISERVE_H3_TIERS",)
    )
    h3_permits: int = knob(
        0,
        "Slots that one of its requests takes; 0 means none, since it owns its memory itself.",
        unit="slots",
        aliases=("OMNISERVE_H3_PERMITS",),
        ge=0,
        le=4096,
    )
    h3_timeout_ms: int = knob(
        1_800_000, "Longest answer of it.", unit="ms", aliases=("OMNISERVE_H3_TIMEOUT_MS",), ge=1, le=86_400_000
    )

    secret: SecretStr | None = knob(
        None,
        "The shared key; relay only wants to know that there is one, admission checks it.",
        secret=True,
        aliases=("OMNISERVE_SECRET",),
    )
    operator_token: SecretStr | None = knob(
        None,
        "The operator listener's key; relay only wants to know that there is one, admission checks it.",
        secret=True,
        aliases=("OMNISERVE_OPERATOR_TOKEN",),
    )

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        """Refuse at the start what a reload would refuse, file and line included."""
        assemble(self, read(self.config), environ=None, route_ids=[spec.route_id for spec in ROUTES])
        return self
