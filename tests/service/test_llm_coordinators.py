"""Other processes are asked to hold, over real HTTP: in order, each for a bounded time, released in reverse order."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from services.kit.hosts.coordinators import Coordinators, NotHeldError


class Peers:
    """Processes by name, all on one port; `answers`: what one says to a hold instead of 200."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.answers: dict[str, bytes] = {}
        self.silent: set[str] = set()
        self.base = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                target = head.split()[1].decode()
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                await reader.readexactly(length)
                self.heard.append(target)
                name = target.split("/")[1]
                if name in self.silent and "hold" in target:
                    await asyncio.sleep(60)
                body = self.answers.get(name, b"200 OK\r\ncontent-length: 2\r\n\r\n{}")
                writer.write(b"HTTP/1.1 " + (body if "hold" in target else b"200 OK\r\ncontent-length: 2\r\n\r\n{}"))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    found = Peers()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield found
    server.close()


@pytest.fixture
async def ask(peers):
    async with httpx.AsyncClient(trust_env=False) as http:

        def coordinators(*names: str, wait_s: float = 30.0) -> Coordinators:
            return Coordinators([f"{peers.base}/{name}/" for name in names], lambda: http, wait_s=wait_s, load_s=10)

        yield coordinators


async def test_all_hold_in_order_and_are_released_in_reverse_order(peers, ask):
    async with ask("a", "b").holding():
        assert peers.heard == ["/a/admin/hold?seconds=130", "/b/admin/hold?seconds=130"]
    assert peers.heard[2:] == ["/b/admin/release", "/a/admin/release"]


async def test_a_failure_or_a_cancellation_meanwhile_releases_all(peers, ask):
    with pytest.raises(LookupError):
        async with ask("a", "b").holding():
            raise LookupError
    assert peers.heard[2:] == ["/b/admin/release", "/a/admin/release"]
    peers.heard.clear()
    held = asyncio.Event()

    async def hold() -> None:
        async with ask("a").holding():
            held.set()
            await asyncio.Event().wait()

    holding = asyncio.ensure_future(hold())
    await held.wait()
    holding.cancel()
    await asyncio.wait([holding])
    assert peers.heard[1:] == ["/a/admin/release"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"503 Busy\r\ncontent-length: 5\r\n\r\nlater", "503 later"),
        (b'200 OK\r\ncontent-length: 17\r\n\r\n{"drained":false}', "has not ended within 30 s"),
    ],
)
async def test_one_that_does_not_hold_ends_it_and_everybody_who_was_asked_is_released(peers, ask, answer, why):
    peers.answers["b"] = answer
    with pytest.raises(NotHeldError, match=why):
        await ask("a", "b", "c").holding().__aenter__()
    assert [each.split("?")[0] for each in peers.heard] == [
        "/a/admin/hold",
        "/b/admin/hold",
        "/b/admin/release",
        "/a/admin/release",
    ]


async def test_one_that_says_nothing_is_waited_for_a_bounded_time(peers, ask):
    peers.silent.add("a")
    with pytest.raises(NotHeldError, match="ReadTimeout"):
        await ask("a", wait_s=0.2).holding().__aenter__()
    assert peers.heard[-1] == "/a/admin/release"


async def test_one_that_is_not_there_is_named():
    async with httpx.AsyncClient(trust_env=False) as http:
        nobody = Coordinators(["http://127.0.0.1:9"], lambda: http, wait_s=5, load_s=1)
        with pytest.raises(NotHeldError, match=r"http://127.0.0.1:9 did not hold: ConnectError"):
            await nobody.holding().__aenter__()
