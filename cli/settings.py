"""Settings of the `omniserve` command; options on the command line win over them."""

from pathlib import Path
from typing import ClassVar, Final

from pydantic import SecretStr

from cli.errors import CliError, Exit
from services.kit.settings import MeshSettings, ServiceSettings, SettingsError, knob, load

_ROOT: Final = Path(__file__).resolve().parents[1]
_STATE_HOME: Final = Path("~/.local/state/omniserve")


class CliSettings(ServiceSettings):
    """What the command needs to know to reach a mesh, and where it keeps files."""

    service: ClassVar[str] = "cli"

    url: str = knob("", "Address of the public front door; empty means the one on this machine.")
    operator_url: str = knob(
        "",
        "Address of the operator's front door, which shows more; `status` asks it first. Empty means the one on this machine.",
    )
    port: int = knob(
        8791,
        "Port of this machine's public front door, as the front door has it.",
        aliases=("OMNISERVE_EDGE_PORT", "OMNISERVE_PORT"),
        ge=1,
        le=65535,
    )
    operator_port: int = knob(
        8792,
        "Port of this machine's operator front door, as the front door has it.",
        aliases=("OMNISERVE_EDGE_OPERATOR_PORT",),
        ge=1,
        le=65535,
    )
    api_key: SecretStr = knob(
        SecretStr(""), "Key shown to the front door; empty sends none.", aliases=("OMNISERVE_API_KEY",), secret=True
    )
    models_dir: Path = knob(
        _ROOT / "models",
        "Folder that `models pull` fetches into and `models list --local` reads.",
        aliases=("OMNISERVE_MODELS_DIR",),
    )
    state_dir: Path = knob(
        MeshSettings.model_fields["state_dir"].default,
        "Directory of run-time state, as the services have it; `doctor` looks there.",
        aliases=("OMNISERVE_STATE_DIR",),
        shared=True,
    )
    history: Path = knob(_STATE_HOME / "chat_history", "File of what was typed in interactive chats; mode 0600.")
    connect_timeout_s: float = knob(5.0, "How long to try to connect to the front door.", unit="s", gt=0, le=600)

    @property
    def public_door(self) -> str:
        """Where the public front door is: as said, else on this machine."""
        return self.url or f"http://127.0.0.1:{self.port}"

    @property
    def operator_door(self) -> str:
        """Where the operator's front door is: as said, else on this machine."""
        return self.operator_url or f"http://127.0.0.1:{self.operator_port}"


def read_settings() -> CliSettings:
    """Read the settings from the environment. Raises CliError naming each bad variable."""
    try:
        return load(CliSettings)
    except SettingsError as error:
        raise CliError("\n".join(error.problems), code=Exit.USAGE) from error


def base_url(text: str) -> str:
    """Return the front door's address without a trailing slash or `/v1`, which SDK users are used to write."""
    return text.strip().rstrip("/").removesuffix("/v1").rstrip("/")
