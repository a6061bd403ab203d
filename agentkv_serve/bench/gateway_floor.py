"""The least that a proxy of this kind costs: the gateway's HTTP server and its client of workers, and nothing between.

Run as `python -m agentkv_serve.bench.gateway_floor PORT WORKER_URL`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import uvicorn
from starlette.types import Receive, Scope, Send

from agentkv_serve.gateway.settings import UpstreamSettings
from agentkv_serve.gateway.upstream.client import EngineClient


@dataclass(frozen=True)
class _Worker:
    url: str
    key: str | None = None


class Floor:
    """Passes every POST on to the worker as it is, and its reply back as it comes."""

    def __init__(self, url: str) -> None:
        self._worker = _Worker(url)
        self._client: EngineClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            self._client = EngineClient(UpstreamSettings())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._client.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        assert self._client is not None
        if scope["method"] != "POST":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
            return
        reply = await self._client.generate(self._worker, body)
        kind = reply.headers["content-type"].encode()
        if kind.startswith(b"text/event-stream"):
            await send({"type": "http.response.start", "status": reply.status, "headers": [(b"content-type", kind)]})
            async for piece in reply.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})
            return
        whole = await reply.read()
        headers = [(b"content-type", kind), (b"content-length", str(len(whole)).encode())]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": whole})


if __name__ == "__main__":
    uvicorn.run(
        Floor(sys.argv[2]),
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        loop="uvloop",
        http="httptools",
        ws="none",
        server_header=False,
        date_header=False,
    )
