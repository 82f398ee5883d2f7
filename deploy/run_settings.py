"""Settings of the launcher."""

from typing import ClassVar

from services.kit.settings import MeshSettings, knob


class RunSettings(MeshSettings):
    """What the launcher needs to know beyond what it starts."""

    service: ClassVar[str] = "run"

    ready_timeout_s: float = knob(
        300.0, "How long a service may take to become ready before the launcher gives up.", unit="s", gt=0, le=86_400
    )
