"""The least that a relay in Python can be, to compare with: `python relay.py PORT UPSTREAM` passes everything on.

It knows no keys, permits, routes or logs. aiohttp at both ends, which is the fastest usual pair; run by the Python of its
peer's environment (peer.py), one process per core on a shared port.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import aiohttp
import uvloop
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_OF_ONE_HOP = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "content-length"})


def application(upstream: str) -> web.Application:
    """Return the relay to an upstream, http://host:port."""
    sessions: list[aiohttp.ClientSession] = []

    async def session(_: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as opened:
            sessions.append(opened)
            yield

    async def relay(request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_ONE_HOP}
        body = await request.read()
        async with sessions[0].request(
            request.method, f"{upstream}{request.raw_path}", headers=headers, data=body, allow_redirects=False
        ) as answer:
            back = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_ONE_HOP}
            if answer.content_length is not None:
                return web.Response(status=answer.status, headers=back, body=await answer.read())
            response = web.StreamResponse(status=answer.status, headers=back)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response

    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", relay)
    return app


def main() -> None:
    """Serve until told to stop."""
    port, upstream = int(sys.argv[1]), sys.argv[2]
    app = application(upstream)
    web.run_app(
        app, host="127.0.0.1", port=port, reuse_port=True, access_log=None, print=None, loop=uvloop.new_event_loop()
    )


if __name__ == "__main__":
    main()
