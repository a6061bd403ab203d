"""POST /internal/workers/register: a worker says that it is there. For the private network of the engines."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.routing.joining import join, read_announcement
from agentkv_serve.gateway.runtime import runtime_of
from agentkv_serve.gateway.sessions.store import StoreDown
from agentkv_serve.joining import SIGNATURE

_MOST_BYTES = 4096


async def register(request: Request) -> Response:
    """Take a worker in, or let it go. Without a join token nobody can register."""
    runtime = runtime_of(request)
    token = runtime.settings.join_token
    if token is None:
        raise ApiError(404, "not_found", "Workers cannot register here: set join_token to let them.")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise ApiError(413, "body_too_large", f"The body is larger than {_MOST_BYTES} bytes.")
    said = read_announcement(token.get_secret_value(), body, request.headers.get(SIGNATURE, ""))
    try:
        worker = await join(runtime, said)
    except StoreDown:
        raise ApiError(503, "store_down", "The shared store is down; the worker is asked to come again.") from None
    state = {"id": worker.id, "healthy": worker.healthy} if worker else {"left": said.url}
    return Response(dumps(state), media_type="application/json")
