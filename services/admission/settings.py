"""Settings of admission: every knob once."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from services.admission.core.intake import Intake
from services.admission.core.model import Modality, PoolSpec, Rules
from services.kit.settings import Address, MeshSettings, knob

Units = Literal["all"] | int
CPU_POOL = "cpu"


def _permits(modality: str, default: Units, what: str) -> Units:
    alias = f"OMNISERVE_{modality.upper()}_PERMITS"
    units: Units = knob(default, f"Slots that {what} takes; `all` is the whole pool.", unit="slots", aliases=(alias,))
    return units


class AdmissionSettings(MeshSettings):
    """What the owner of the box can set."""

    service: ClassVar[str] = "admission"

    listen: Address = knob("127.0.0.1:9101", "Where the service listens.")
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
        return self

    def pools(self) -> tuple[PoolSpec, ...]:
        """Return the pools."""
        gpus = tuple(PoolSpec(f"gpu{number}", self.slots) for number in range(self.gpus))
        return (*gpus, PoolSpec(CPU_POOL, self.cpu_slots))

    def rules(self) -> Rules:
        """Return the policy."""
        return Rules(max_queue=self.max_queue, ageing_s=self.ageing_s or None, fair_share=self.fair_share)

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
