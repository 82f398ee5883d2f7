"""facade: `python -m facade`."""

from facade.server import serve
from facade.settings import FacadeSettings
from services.kit.owner import Owner
from services.kit.run import run


async def main(settings: FacadeSettings, owner: Owner) -> None:
    """Serve until told to stop."""
    await serve(settings, owner)


if __name__ == "__main__":
    run(FacadeSettings, main)
