"""The outermost layer: request ids, errors in one shape, counts. Pure ASGI, so that streams pass untouched."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentkv_serve.gateway.dialects.anthropic import error_body
from agentkv_serve.gateway.encoding import NestedTooDeeply, dumps
from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.turns.departure import ClientGone

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CLIENT_CLOSED = 499


Handler = Callable[[Request], Awaitable[Response]]


class Edge:
    """ASGI middleware around everything. `direct`: handlers by method and path that requests reach without a search
    through all routes."""

    def __init__(self, app: ASGIApp, direct: Mapping[tuple[str, str], Handler]) -> None:
        self.app = app
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, started = 0, time.monotonic()

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        metrics = scope["app"].state.runtime.metrics
        metrics.inflight.inc()
        try:
            handler = self._direct.get((scope["method"], scope["path"]))
            if handler is None:
                await self.app(scope, receive, tell)
            else:
                scope["endpoint"] = handler
                await _serve(handler, scope, receive, tell)
        except ClientGone:
            status = CLIENT_CLOSED
        except Exception:  # the last stand: whatever failed becomes a 500 in the API's own shape, and is logged
            log.exception("request %s failed", request_id)
            if status:
                raise
            await _internal().response()(scope, receive, tell)
        finally:
            metrics.inflight.dec()
            route = getattr(scope.get("endpoint"), "__name__", "unknown")
            metrics.of(metrics.requests, route, str(status)).inc()
            metrics.of(metrics.duration, route).observe(time.monotonic() - started)


async def _serve(handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive, send)
    try:
        response = await handler(request)
    except ApiError as error:
        response = await api_error(request, error)
    except NestedTooDeeply as error:
        response = await nested_too_deeply(request, error)
    await response(scope, receive, send)


async def api_error(request: Request, error: Exception) -> Response:
    """Handler of ApiError."""
    assert isinstance(error, ApiError)
    reply = error.response()
    if request.url.path.startswith("/v1/messages"):
        return Response(dumps(error_body(error)), reply.status_code, _own_headers(reply), media_type="application/json")
    return reply


async def nested_too_deeply(request: Request, error: Exception) -> Response:
    """Handler of NestedTooDeeply: nothing is nested but what the client sent."""
    return await api_error(request, bad_request("The request is nested too deeply: it may go 250 levels deep."))


async def http_error(request: Request, error: Exception) -> Response:
    """Handler of the framework's own errors: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    return ApiError(error.status_code, code, message, headers=error.headers).response()


async def client_gone(request: Request, error: Exception) -> Response:
    """Handler of ClientGone: nobody reads this, but the status is counted."""
    return Response(status_code=CLIENT_CLOSED)


def _own_headers(reply: Response) -> dict[str, str]:
    return {k: v for k, v in reply.headers.items() if k not in ("content-length", "content-type")}


def _internal() -> ApiError:
    return ApiError(500, "internal_error", "The gateway failed on this request; its log says why.")
