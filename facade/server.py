"""The HTTP server around the application: uvicorn, with our own start, drain and end."""

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final

import grpc.aio
import uvicorn
from typing_extensions import override

from facade.app import build_app
from facade.holds import HoldCalls
from facade.images import ImageCalls
from facade.kept_pictures import KeptPictures
from facade.memory import VramCalls
from facade.peers import LlmCalls, Peers
from facade.session import METHOD, Dial, LlmSession
from facade.settings import FacadeSettings
from facade.store import ResponseStore
from facade.wiring import Facade
from services.kit import telemetry
from services.kit.channels import MAX_MESSAGE_BYTES, identity, open_channel
from services.kit.clock import SystemClock
from services.kit.errors import DomainError, Reason
from services.kit.owner import Owner
from services.kit.tokens import TokenBook
from services.kit.wire.dial import LongCall, dialled

_log = telemetry.logger(__name__)

# Longer than the front door keeps an idle connection, so that no request meets one being closed.
_KEEP_ALIVE_S: Final = 60
# After the streams were told to end, for their last words.
_LAST_WORDS_S: Final = 1.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process by the signal itself after the drain."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


async def serve(settings: FacadeSettings, owner: Owner, *, started: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain: no new connections, streams end by themselves within the grace.

    After `settings.drain_grace_s` the rest is told so and ended; a second signal does not wait. `started` gets the port.
    Raises OSError when the port is taken, ValueError when token checks are off on an address that others reach.
    """
    signals: asyncio.Queue[int] = asyncio.Queue()
    with _signals(signals):
        async with _open(settings, owner) as running:
            if started is not None:
                started(running.port)
            await signals.get()
            drain = owner.start(running.drain(), name="drain")
            hurry = owner.start(_hurry(signals, running), name="second signal")
            await drain
            hurry.cancel()


@asynccontextmanager
async def running_facade(settings: FacadeSettings) -> AsyncIterator["Running"]:
    """Serve for the length of a block, listening to no signals; drains at its end."""
    async with Owner() as owner, _open(settings, owner) as running:
        yield running
        await running.drain()


class Running:
    """A facade that serves on `port`."""

    def __init__(self, server: _Server, serving: "asyncio.Task[None]", facade: Facade, port: int) -> None:
        self.port = port
        self.facade = facade
        self._server = server
        self._serving = serving

    async def drain(self) -> None:
        """Take no new connections; let what runs end within the grace, then end it; return when all have gone."""
        grace_s = self.facade.settings.drain_grace_s
        _log.info("draining", grace_s=grace_s, generations=self.facade.session.running)
        self.facade.draining.set()
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=grace_s)
        self.facade.session.close(DomainError(Reason.DRAINING, "The facade is shutting down."))
        await self._serving

    def hurry(self) -> None:
        """Do not wait any longer for what runs."""
        self.facade.session.close(DomainError(Reason.DRAINING, "The facade is shutting down."))
        self._server.force_exit = True


async def _hurry(signals: "asyncio.Queue[int]", running: Running) -> None:
    await signals.get()
    running.hurry()


@asynccontextmanager
async def _open(settings: FacadeSettings, owner: Owner) -> AsyncIterator[Running]:
    host, _, port = settings.listen.rpartition(":")
    host = host.strip("[]")
    if not settings.check_tokens and not _is_loopback(host):
        raise ValueError(f"token checks may be off only on a loopback address, not on {settings.listen}")
    listener = _listen(host, int(port))
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        facade = await _wire(settings, owner, stack)
        book = TokenBook(settings.state_dir) if settings.check_tokens else None
        server = _Server(_config(facade, book))
        serving = owner.start(server.serve(sockets=[listener]), name="HTTP server")
        await server.listening.wait()
        bound = listener.getsockname()[1]
        _log.info("serving", listen=settings.listen, port=bound)
        yield Running(server, serving, facade, bound)


async def _wire(settings: FacadeSettings, owner: Owner, stack: AsyncExitStack) -> Facade:
    addresses = {"admission": settings.admission_address, "llm": settings.llm_address, "vram": settings.vram_address}
    addresses |= {"jobs": settings.jobs_address, "diffusion": settings.diffusion_address}
    channels = {name: await _channel(stack, settings, address) for name, address in addresses.items()}
    clock = SystemClock()
    limits = {"limit_s": settings.call_limit_s, "wait_s": settings.peer_wait_s}
    session = LlmSession(_dial(settings), wait_s=settings.peer_wait_s)
    keeper = owner.start(session.run(), name="stream to llm")
    stack.push_async_callback(_end, keeper)
    return Facade(
        settings=settings,
        owner=owner,
        clock=clock,
        session=session,
        llm=LlmCalls(channels["llm"], clock, **limits),
        images=ImageCalls(channels["diffusion"], clock, owner, **limits),
        kept_pictures=KeptPictures(channels["jobs"], **limits),
        vram=VramCalls(channels["vram"], **limits),
        holds=HoldCalls(channels["admission"], **limits),
        peers=Peers(channels, clock, health_limit_s=settings.health_limit_s, status_budget_s=settings.status_budget_s),
        responses=ResponseStore(channels["jobs"], **limits),
    )


async def _channel(stack: AsyncExitStack, settings: FacadeSettings, address: str) -> grpc.aio.Channel:
    return await stack.enter_async_context(open_channel(address, caller=settings.service, state_dir=settings.state_dir))


def _dial(settings: FacadeSettings) -> Dial:
    shown = identity(settings.service, settings.state_dir)

    def dial(heard: Callable[[bytes], None]) -> AbstractAsyncContextManager[LongCall]:
        return dialled(settings.llm_address, METHOD, metadata=shown, heard=heard, most_bytes=MAX_MESSAGE_BYTES)

    return dial


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])


def _config(facade: Facade, book: TokenBook | None) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(facade, book),
        http="httptools",
        loop="none",  # the caller's
        ws="none",
        lifespan="off",
        interface="asgi3",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="warning",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=facade.settings.drain_grace_s + _LAST_WORDS_S,  # type: ignore[arg-type]  # only slept
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    listener.settimeout(0)
    return listener


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@contextmanager
def _signals(received: "asyncio.Queue[int]") -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, received.put_nowait, int(number))
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
