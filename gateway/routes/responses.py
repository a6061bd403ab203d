"""POST /v1/responses, and GET and DELETE of one response."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.auth import Tenant
from agentkv_serve.gateway.dialects.responses import ResponsesDialect, chat_body
from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.routes.reading import read_json
from agentkv_serve.gateway.routes.serving import serve_turn
from agentkv_serve.gateway.runtime import Runtime, runtime_of
from agentkv_serve.gateway.sessions.identity import SESSION_HEADER
from agentkv_serve.gateway.turns.request import read_chat


async def create_response(request: Request) -> Response:
    """One turn, streamed or not; it may go on from a kept response."""
    runtime = runtime_of(request)
    tenant = runtime.auth.tenant(request.headers)
    limits = runtime.settings.limits
    body = await read_json(request, limits.body_bytes)
    if not isinstance(body, dict):
        raise bad_request("The body must be a JSON object.")
    history: list[dict[str, Any]] = []
    previous = body.get("previous_response_id")
    if previous is not None:
        kept = await _recall(runtime, tenant, previous)
        if kept is None:
            raise bad_request(
                "previous_response_id names no kept response.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        history = kept["messages"]
        if kept["session"] and not _names_session(request, body):
            body["session_id"] = kept["session"]
    chat = read_chat(chat_body(body, history), limits)

    async def keep(response_id: str, value: dict[str, Any]) -> None:
        key = runtime.keys.response(tenant.name, response_id)
        await runtime.store.keep(key, dumps(value), runtime.settings.sessions.idle_ttl)

    return await serve_turn(request, tenant, chat, ResponsesDialect(body, keep))


async def one_response(request: Request) -> Response:
    """A kept response of the caller (GET), or its removal (DELETE)."""
    runtime = runtime_of(request)
    tenant = runtime.auth.tenant(request.headers)
    response_id = request.path_params["response_id"]
    kept = await _recall(runtime, tenant, response_id)
    if kept is None:
        raise ApiError(404, "response_not_found", "No response of that id is kept.")
    if request.method == "DELETE":
        await runtime.store.discard(runtime.keys.response(tenant.name, response_id))
        body = {"id": response_id, "object": "response", "deleted": True}
        return Response(dumps(body), media_type="application/json")
    return Response(dumps(kept["response"]), media_type="application/json")


async def _recall(runtime: Runtime, tenant: Tenant, response_id: Any) -> dict[str, Any] | None:
    if not isinstance(response_id, str):
        raise bad_request("previous_response_id must be a string.", param="previous_response_id")
    kept = await runtime.store.recall(runtime.keys.response(tenant.name, response_id))
    return None if kept is None else dict(orjson.loads(kept))


def _names_session(request: Request, body: dict[str, Any]) -> bool:
    headers = request.headers
    mirror = body.get("agentkv")
    named = isinstance(mirror, dict) and mirror.get("session_id")
    return bool(named or body.get("session_id") or SESSION_HEADER in headers or "x-session-id" in headers)
