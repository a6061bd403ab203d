"""The caller's own sessions: list, look at, release."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from agentkv_serve.gateway.auth import Tenant
from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.runtime import Runtime, runtime_of
from agentkv_serve.gateway.sessions.session import Session
from agentkv_serve.gateway.turns.controls import say_budget

_PAGE = 1000


async def list_sessions(request: Request) -> Response:
    """The caller's sessions, the one used last first."""
    runtime = runtime_of(request)
    tenant = runtime.auth.tenant(request.headers)
    sessions = await runtime.store.sessions(tenant.name)
    sessions.sort(key=lambda s: s.used, reverse=True)
    body = {"object": "list", "total": len(sessions), "data": [_show(s) for s in sessions[:_PAGE]]}
    return Response(dumps(body), media_type="application/json")


async def one_session(request: Request) -> Response:
    """One session (GET), or its end (DELETE): the same id then starts anew."""
    runtime = runtime_of(request)
    tenant = runtime.auth.tenant(request.headers)
    found = await _find(runtime, tenant, request.path_params["session_id"])
    if not found:
        raise ApiError(404, "session_not_found", "You hold no session of that id.")
    if request.method == "GET":
        body = {"object": "list", "data": [_show(session) for session in found]}
        return Response(dumps(body if len(found) > 1 else _show(found[0])), media_type="application/json")
    for session in found:
        await runtime.end_session(session)
    return Response(status_code=204)


async def release_session(request: Request) -> Response:
    """End a session; 204 also when there is none, so that it can be said twice."""
    runtime = runtime_of(request)
    tenant = runtime.auth.tenant(request.headers)
    for session in await _find(runtime, tenant, request.path_params["session_id"]):
        await runtime.end_session(session)
    return Response(status_code=204)


async def _find(runtime: Runtime, tenant: Tenant, session_id: str) -> list[Session]:
    """The tenant's sessions of that id: one for each model that it was used with."""
    found = []
    for model in runtime.registry.models():
        for key in runtime.keys.sessions(tenant.name, session_id, model):
            session, _ = await runtime.store.peek(key)
            if session:
                found.append(session)
    return found


def _show(session: Session) -> dict[str, Any]:
    return {
        "id": session.id,
        "object": "agentkv.session",
        "model": session.model,
        "turns": session.turns,
        "logical_tokens": sum(turn.tokens for turn in session.ledger.path(session.ledger.head)),
        "kv_tokens": session.kv_tokens,
        "budget": None if session.budget is None else say_budget(session.budget),
        "policy": session.policy,
        "retain": session.retain,
        "worker": session.worker or None,
        "tokens_used": session.spent,
        "token_limit": session.token_limit,
    }
