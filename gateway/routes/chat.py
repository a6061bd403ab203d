"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.routes.reading import read_json
from agentkv_serve.gateway.routes.stream import TurnStream
from agentkv_serve.gateway.runtime import runtime_of
from agentkv_serve.gateway.turns.departure import Departure
from agentkv_serve.gateway.turns.request import read_chat
from agentkv_serve.gateway.turns.turn import Turn


async def chat_completions(request: Request) -> Response:
    """One chat turn, streamed or not."""
    runtime = runtime_of(request)
    tenant = runtime.auth.tenant(request.headers)
    settings = runtime.settings
    chat = read_chat(await read_json(request, settings.limits.body_bytes), settings.limits)
    departure = Departure(request.receive)
    await departure.__aenter__()
    handed_on = False
    try:
        plan = await departure.unless_gone(runtime.planner.plan(chat, tenant, request.headers))
        turn = Turn(runtime.services, plan)
        departure.then(turn.abort)
        await turn.place()
        opening = asyncio.create_task(turn.open())
        if chat.stream:
            # Refusals come as HTTP errors as long as they come soon; after that keep-alives must begin.
            await asyncio.wait({opening}, timeout=settings.stream.ping)
            if opening.done():
                opening.result()
            handed_on = True
            return TurnStream(turn, opening, departure, settings.stream)
        await opening
        reply = await turn.whole()
        return Response(dumps(reply), 200, turn.headers(), media_type="application/json")
    finally:
        if not handed_on:
            await departure.__aexit__(None, None, None)
