"""A turn as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentkv_serve.gateway.dialects.dialect import Dialect
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.turns.departure import ClientGone, Departure
from agentkv_serve.gateway.turns.turn import Turn

SSE_HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}


class TurnStream(Response):
    """Relays a turn whose `open` runs in the task `opening`; keep-alives fill every silence of `ping` seconds."""

    def __init__(
        self, turn: Turn, dialect: Dialect, opening: asyncio.Task[None], departure: Departure, ping: float
    ) -> None:
        super().__init__(None, 200, {**turn.headers(), **dialect.headers(turn), **SSE_HEADERS})
        del self.headers["content-length"]
        self._turn = turn
        self._dialect = dialect
        self._opening = opening
        self._departure = departure
        self._every = ping
        self._last = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        pings = asyncio.create_task(self._ping(send))
        try:
            await self._relay(send)
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)
            await self._departure.__aexit__(None, None, None)
        if not self._departure.gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _relay(self, send: Send) -> None:
        turn, dialect = self._turn, self._dialect
        try:
            await self._write(send, dialect.begin(turn))
            await self._opening
            # Goes on to the end for a client that has left: only then is the session free.
            async for frames in turn.contents():
                await self._write(send, dialect.content(frames))
            if turn.failure is not None:
                raise turn.failure
            if not turn.aborted:
                await self._write(send, await dialect.end(turn))
        except ApiError as error:
            await self._write(send, dialect.failure(error))
        except ClientGone:
            return
        except asyncio.CancelledError:
            stopping = ApiError(503, "gateway_stopping", "The gateway stops; send the turn again.")
            await self._write(send, dialect.failure(stopping))
            raise

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(max(0.01, self._last + self._every - time.monotonic()))
            if time.monotonic() - self._last >= self._every:
                await self._write(send, self._dialect.keep_alive(self._turn))

    async def _write(self, send: Send, data: bytes) -> None:
        if data and not self._departure.gone:
            self._last = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})
