"""What the routes work with."""

import asyncio
from dataclasses import dataclass, field

from facade.holds import HoldCalls
from facade.images import ImageCalls
from facade.kept_pictures import KeptPictures
from facade.memory import VramCalls
from facade.peers import LlmCalls, Peers
from facade.session import LlmSession
from facade.settings import FacadeSettings
from facade.store import ResponseStore
from services.kit.clock import Clock
from services.kit.owner import Owner


@dataclass(frozen=True, slots=True)
class Facade:
    """One facade: its settings, its ways to the services, and whether it is on its way out."""

    settings: FacadeSettings
    owner: Owner
    clock: Clock
    session: LlmSession
    llm: LlmCalls
    images: ImageCalls
    kept_pictures: KeptPictures
    vram: VramCalls
    holds: HoldCalls
    peers: Peers
    responses: ResponseStore
    draining: asyncio.Event = field(default_factory=asyncio.Event)
