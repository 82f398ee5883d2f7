"""Clients that hang up at random moments leave nothing behind: no permit, no sequence."""

import asyncio
import json
import random
import time
from urllib.parse import urlsplit

import httpx

BODY = {
    "messages": [{"role": "user", "content": "Tell a long story about a river. " * 12}],
    "max_tokens": 400,
    "ignore_eos": True,
}


async def hang_up(address, moment: float, *, stream: bool) -> None:
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    content = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    try:
        async with asyncio.timeout(moment):
            while await reader.read(4096):
                pass
    except TimeoutError:
        pass
    writer.transport.abort()


async def test_random_disconnects_leave_no_permit_and_no_sequence(mesh):
    chance = random.Random(20261130)
    address = urlsplit(mesh.public_url)
    gate = asyncio.Semaphore(24)

    async def one() -> None:
        async with gate:
            await hang_up(address, chance.uniform(0, 0.6), stream=chance.random() < 0.7)

    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(one())

    async with httpx.AsyncClient(base_url=mesh.operator_url, timeout=60) as client:
        deadline = time.monotonic() + 60
        while True:
            services = (await client.get("/status")).json()["services"]
            engine = services["llm"]["engines"][0]
            pools = services["admission"]["pools"]
            left = (
                int(engine["active_sequences"]),
                int(engine["waiting_requests"]),
                sum(int(pool["in_use"]) for pool in pools),
                sum(int(pool["permits"]) for pool in pools),
                sum(int(pool["waiting"]) for pool in pools),
            )
            if left == (0, 0, 0, 0, 0):
                break
            assert time.monotonic() < deadline, f"sequences, requests, slots, permits, waiters left: {left}"
            await asyncio.sleep(0.1)
