"""Settings of admission: every knob once."""

import ipaddress
import re
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

from pydantic import SecretStr, model_validator

from services.admission.core.identity import Policy
from services.admission.core.intake import Intake
from services.admission.core.model import Modality, PoolSpec, Rules
from services.kit.config import config_knob
from services.kit.settings import Address, MeshSettings, knob

Units = Literal["all"] | int
CPU_POOL = "cpu"
# What survives a header as it is: visible, no comma (it joins the values of a repeated header).
_SECRET: Final = re.compile(r"[\x21-\x2b\x2d-\x7e]*")


def _permits(modality: str, default: Units, what: str) -> Units:
    alias = f"OMNISERVE_{modality.upper()}_PERMITS"
    units: Units = knob(default, f"Slots that {what} takes; `all` is the whole pool.", unit="slots", aliases=(alias,))
    return units


class AdmissionSettings(MeshSettings):
    """What the owner of the box can set."""

    service: ClassVar[str] = "admission"

    listen: Address = knob("127.0.0.1:9101", "Where the service listens.")
    checks_listen: Address | None = knob(
        None, "Where Envoy asks about each request; by default the port of LISTEN plus 11, so 9112."
    )
    slots: int = knob(
        16, "Slots of each GPU pool: device users at once.", unit="slots", aliases=("OMNISERVE_SLOTS",), ge=1, le=4096
    )
    gpus: int = knob(1, "GPU pools: gpu0, gpu1, ...; without a GPU, gpu0 stands for the box.", ge=1, le=64)
    cpu_slots: int = knob(2, "Slots of the pool `cpu`.", unit="slots", ge=1, le=4096)
    cpu_modalities: tuple[str, ...] = knob(("embedding",), "Modalities that use the pool `cpu`, separated by commas.")
    modality_pools: tuple[str, ...] = knob(
        (), "Pools of further modalities, as `image=gpu1,video=gpu1`; all others use gpu0."
    )
    timeout_s: float = knob(120.0, "How long an ask waits when it names no time itself.", unit="s", gt=0, le=86_400)
    max_queue: int = knob(
        10_000, "Longest queue of a pool; who comes then is refused at once.", aliases=("OMNISERVE_MAX_QUEUE",), ge=0
    )
    ageing_s: float = knob(
        0.0, "After each such time a waiter rises one tier, never out of background; 0 is off.", unit="s", ge=0
    )
    fair_share: bool = knob(
        False,  # noqa: FBT003 - the default
        "Inside a tier, serve principals in turn instead of first come, first served.",
    )
    session_grace_s: float = knob(5.0, "How long a lost session keeps its permits.", unit="s", ge=0, le=600)
    settle_s: float = knob(
        3.0, "After a restart nothing is granted until known sessions are back, or for so long.", unit="s", ge=0, le=600
    )

    config: Path | None = config_knob()
    secret: SecretStr = knob(
        SecretStr(""),
        "A shared API key that may ask for any tier; empty means none.",
        aliases=("OMNISERVE_SECRET",),
        secret=True,
    )
    allow_anonymous: bool = knob(
        False,  # noqa: FBT003 - the default
        "Let callers without a key in although there are keys, or although others reach the public listener.",
        aliases=("OMNISERVE_ALLOW_ANONYMOUS",),
    )
    anonymous_tier: Literal["auto", "paid", "sub", "free", "background"] = knob(
        "auto",
        "Best tier of callers without a key; `auto` is any while there are no keys and only this machine gets in, else free.",
        aliases=("OMNISERVE_ANONYMOUS_TIER",),
    )
    public_bind: str = knob(
        "127.0.0.1",
        "Address of the public listener, as the front door has it: on loopback anonymous callers are the owner.",
        aliases=("OMNISERVE_EDGE_PUBLISHED_BIND", "OMNISERVE_EDGE_BIND", "OMNISERVE_BIND"),
    )
    operator_token: SecretStr = knob(
        SecretStr(""),
        "What the operator listener wants as `Authorization: Bearer`; empty wants nothing.",
        aliases=("OMNISERVE_OPERATOR_TOKEN",),
        secret=True,
    )

    llm_permits: Units = _permits("llm", 1, "a generation")
    embedding_permits: Units = _permits("embedding", 1, "an embedding request")
    image_permits: Units = _permits("image", "all", "an image")
    tts_permits: Units = _permits("tts", 1, "speech synthesis")
    stt_permits: Units = _permits("stt", 1, "a transcription")
    multimodal_permits: Units = _permits("multimodal", 1, "a multimodal request")
    animation_permits: Units = _permits("animation", "all", "an animation")
    three_d_permits: Units = knob(
        "all", "Slots that a 3D object takes; `all` is the whole pool.", unit="slots", aliases=("OMNISERVE_3D_PERMITS",)
    )
    video_permits: Units = _permits("video", "all", "a video")
    forecast_permits: Units = _permits("forecast", 1, "a forecast")
    cutout_permits: Units = knob(
        2, "Slots that a cut-out takes; `all` is the whole pool.", unit="slots", aliases=("OMNISERVE_BIREFNET_PERMITS",)
    )
    training_permits: Units = _permits("training", "all", "a training run")
    aux_permits: Units = _permits("aux", 1, "anything else")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for name in self.cpu_modalities:
            if name.upper() not in Modality.__members__:
                known = ", ".join(one.name.lower() for one in Modality)
                raise ValueError(f"OMNISERVE_ADMISSION_CPU_MODALITIES: no modality {name!r}; there are {known}")
        pools = {pool.name for pool in self.pools()}
        for pair in self.modality_pools:
            name, _, pool = pair.partition("=")
            if name.upper() not in Modality.__members__ or pool not in pools:
                known = f"modality=pool, with a pool of {', '.join(sorted(pools))}"
                raise ValueError(f"OMNISERVE_ADMISSION_MODALITY_POOLS: {pair!r} is not {known}")
        for modality in Modality:
            units = self._units(modality)
            if units is not None and units < 0:
                raise ValueError(f"OMNISERVE_ADMISSION_{modality.name}_PERMITS is {units}; the least is 0")
        for name, secret in (("SECRET", self.secret), ("OPERATOR_TOKEN", self.operator_token)):
            if not _SECRET.fullmatch(secret.get_secret_value()):
                raise ValueError(f"OMNISERVE_{name} holds a space, a comma or a character that no header carries")
        return self

    def pools(self) -> tuple[PoolSpec, ...]:
        """Return the pools."""
        gpus = tuple(PoolSpec(f"gpu{number}", self.slots) for number in range(self.gpus))
        return (*gpus, PoolSpec(CPU_POOL, self.cpu_slots))

    def rules(self) -> Rules:
        """Return the policy."""
        return Rules(max_queue=self.max_queue, ageing_s=self.ageing_s or None, fair_share=self.fair_share)

    def policy(self) -> Policy:
        """Return the rules for callers without a key, and the operator's token."""
        return Policy(
            anonymous_tier=self.anonymous_tier,
            allow_anonymous=self.allow_anonymous,
            on_loopback=_is_loopback(self.public_bind),
            operator_token=self.operator_token.get_secret_value(),
        )

    def intake(self) -> Intake:
        """Return the defaults of asks."""
        pool_of = dict.fromkeys(Modality, "gpu0")
        pool_of |= {Modality[name.upper()]: CPU_POOL for name in self.cpu_modalities}
        for pair in self.modality_pools:
            name, _, pool = pair.partition("=")
            pool_of[Modality[name.upper()]] = pool
        return Intake(
            slots={pool.name: pool.slots for pool in self.pools()},
            pool_of=pool_of,
            units_of={one: self._units(one) for one in Modality},
            wait_s=self.timeout_s,
        )

    def _units(self, modality: Modality) -> int | None:
        units: Units = getattr(self, f"{modality.name.lower()}_permits")
        return None if units == "all" else int(units)


def _is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return bind == "localhost"
