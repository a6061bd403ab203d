"""What the page and `agentkv top` read: the fleet, one session, and both as they change. On the admin key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.routes.admin import admitted
from agentkv_serve.gateway.routes.stream import SSE_HEADERS
from agentkv_serve.gateway.runtime import Runtime
from agentkv_serve.gateway.sessions.session import Session
from agentkv_serve.gateway.sessions.store import StoreDown
from agentkv_serve.gateway.views.fleet import fleet, session_of
from agentkv_serve.gateway.views.session import session_view, texts

_EVERY = 1.0  # seconds between two looks
_PING = 15  # looks without news before a comment keeps the connection open


async def fleet_now(request: Request) -> Response:
    """Workers and sessions."""
    return _json(await fleet(admitted(request)))


async def session_now(request: Request) -> Response:
    """One session; `?layer=N` asks for one attention layer alone."""
    runtime = admitted(request)
    session, running = await _session(runtime, request.path_params["key"])
    return _json({**await session_view(runtime, session, _number(request, "layer")), "running": running})


async def session_texts(request: Request) -> Response:
    """The text of each token in `[start, end)`."""
    runtime = admitted(request)
    session, _ = await _session(runtime, request.path_params["key"])
    start, end = _number(request, "start") or 0, _number(request, "end") or 0
    return _json({"start": start, "texts": texts(runtime, session, start, end)})


async def events(request: Request) -> Response:
    """Server-sent events `fleet` and, with `?session=KEY`, `session`: each when it has changed."""
    runtime = admitted(request)
    return StreamingResponse(_changes(runtime, request.query_params.get("session")), headers=dict(SSE_HEADERS))


async def _changes(runtime: Runtime, key: str | None) -> AsyncIterator[bytes]:
    last: dict[str, bytes] = {}
    quiet = total = 0
    while not runtime.stopping:
        fresh: dict[str, bytes] = {}
        try:
            whole = await fleet(runtime)
            total, fresh["fleet"] = whole["total"], dumps(whole)
            found = await session_of(runtime, key) if key else None
            if found:
                view = await session_view(runtime, found[0])
                fresh["session"] = dumps({**view, "running": found[1]})
        except StoreDown:
            fresh["fleet"] = dumps({"error": "The shared store is down."})
        news = [(name, data) for name, data in fresh.items() if last.get(name) != data]
        quiet = 0 if news else quiet + 1
        for name, data in news:
            last[name] = data
            yield b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
        if quiet and quiet % _PING == 0:
            yield b": still here\n\n"
        # Listing many sessions costs the store something: the more there are, the fewer looks.
        await asyncio.sleep(_EVERY * (1 + total // 1000))


async def _session(runtime: Runtime, key: str) -> tuple[Session, bool]:
    found = await session_of(runtime, key)
    if found is None:
        raise ApiError(404, "session_not_found", "No worker holds a session of that key.")
    return found


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise bad_request(f"{name} must be a whole number.", param=name)
    return int(text)


def _json(body: Any) -> Response:
    return Response(dumps(body), media_type="application/json")
