"""The fleet in one object: workers with their load, and the sessions that they hold."""

from __future__ import annotations

from typing import Any

from agentkv_serve.gateway.runtime import Runtime
from agentkv_serve.gateway.sessions.session import Session
from agentkv_serve.gateway.turns.controls import say_budget

SHOWN_KEY = 16
"""Hex digits of a session's key that operators see: enough to tell sessions apart, useless to clients."""
MAX_SESSIONS = 500


async def fleet(runtime: Runtime) -> dict[str, Any]:
    """Workers and sessions, the sessions used last first (at most `MAX_SESSIONS` of them; `total` counts all)."""
    workers, sessions = [], []
    resident = await runtime.store.resident([worker.id for worker in runtime.registry])
    for worker in runtime.registry:
        held = await runtime.store.on_worker(worker.id)
        sessions += held
        workers.append(
            {
                "id": worker.id,
                "url": worker.url,
                "healthy": worker.healthy,
                "draining": worker.draining,
                "breaker": worker.breaker.state,
                "models": worker.models,
                "inflight": worker.inflight,
                "sessions": len(held),
                "kv_tokens": resident.get(worker.id, 0),
            }
        )
    sessions.sort(key=lambda session: session.used, reverse=True)
    return {
        "workers": workers,
        "sessions": [summary(runtime, session) for session in sessions[:MAX_SESSIONS]],
        "total": len(sessions),
        "store": "down" if runtime.store.degraded else "up",
    }


def summary(runtime: Runtime, session: Session) -> dict[str, Any]:
    """One session in a line. Nothing in it was chosen by a client but the budget and the policy."""
    return {
        "key": session.key[:SHOWN_KEY],
        "tenant": session.tenant,
        "model": session.model,
        "worker": session.worker,
        "turns": session.turns,
        "kv_tokens": session.kv_tokens,
        "budget": None if session.budget is None else say_budget(session.budget),
        "policy": session.policy,
        "used": round(session.used, 1),
        "running": session.key in runtime.services.running,
    }


async def session_of(runtime: Runtime, shown: str) -> tuple[Session, bool] | None:
    """The session whose key begins with `shown`, with its ledger, and whether a turn of it runs anywhere."""
    if len(shown) != SHOWN_KEY:
        return None
    for worker in runtime.registry:
        for session in await runtime.store.on_worker(worker.id):
            if session.key.startswith(shown):
                found, running = await runtime.store.peek(session.key)
                return None if found is None else (found, running)
    return None
