"""A chat request on its way through the gateway, whatever API it came by."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.auth import Tenant
from agentkv_serve.gateway.dialects.dialect import Dialect
from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.headers import RequestHeaders
from agentkv_serve.gateway.routes.stream import TurnStream
from agentkv_serve.gateway.runtime import runtime_of
from agentkv_serve.gateway.turns.departure import Departure
from agentkv_serve.gateway.turns.request import ChatRequest
from agentkv_serve.gateway.turns.turn import Turn


async def serve_turn(
    request: Request, tenant: Tenant, chat: ChatRequest, dialect: Dialect, headers: RequestHeaders | None = None
) -> Response:
    """Run one turn and answer in the words of `dialect`. The client may leave at any time."""
    runtime = runtime_of(request)
    given = headers or RequestHeaders(request.scope)
    ping = runtime.settings.stream.ping
    departure = Departure(request.receive)
    await departure.__aenter__()
    handed_on = False
    try:
        plan = await departure.unless_gone(runtime.planner.plan(chat, tenant, given))
        request_id = request.scope["state"]["request_id"]
        turn = Turn(runtime.services, plan, runtime.tracing.begin(given, chat.model), request_id)
        departure.then(turn.abort)
        await turn.place()
        if chat.stream:
            opening = asyncio.create_task(turn.open())
            # Refusals come as HTTP errors as long as they come soon; after that keep-alives must begin.
            await asyncio.wait({opening}, timeout=ping)
            if opening.done():
                opening.result()
            handed_on = True
            return TurnStream(turn, dialect, opening, departure, ping)
        await turn.open()
        reply = await dialect.whole(turn, await turn.whole())
        told = {**turn.headers(), **dialect.headers(turn)}
        return Response(dumps(reply), 200, told, media_type="application/json")
    finally:
        if not handed_on:
            await departure.__aexit__(None, None, None)
