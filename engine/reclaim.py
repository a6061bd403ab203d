"""Nothing is pinned for good: idle sessions give way to work that needs their slots, least recently used first."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.managers.io_struct import CloseSessionReqInput
from sglang.srt.managers.scheduler_components import pool_stats_observer

from agentkv_serve.engine.runtime import Runtime

logger = logging.getLogger(__name__)


def idle_sessions(runtime: Runtime) -> list[Any]:
    """SGLang sessions that hold KV and run no turn, least recently used first.

    Not the one that is being compressed: it may need slots itself, and must not be released to get them.
    """
    controller = runtime.scheduler.session_controller
    slots = runtime.tree.session.slots
    held = [controller.get(key) for key, slot in slots.items() if slot.kv.holds_kv and key != runtime.settling]
    idle = [session for session in held if session is not None and not session._inflight]
    return sorted(idle, key=lambda session: session.last_active_time)


def reclaimable_tokens(runtime: Runtime) -> int:
    """KV slots that releasing every idle session would free at once (shared prefixes not counted)."""
    slots = runtime.tree.session.slots
    page = runtime.tree.page_size
    return sum(
        int(pool_stats_observer.kv_private_tokens(slots[session.session_id].kv, page))
        for session in idle_sessions(runtime)
    )


def release(runtime: Runtime, key: str, reason: str) -> None:
    """Releases a session's KV. Its next turn is rebuilt, with this reason."""
    runtime.scheduler.session_controller.close(CloseSessionReqInput(session_id=key))
    runtime.sessions.close(key, reason)


def release_all(runtime: Runtime) -> None:
    """Releases every idle session."""
    for session in idle_sessions(runtime):
        release(runtime, session.session_id, "evicted")


def free_tokens(runtime: Runtime, count: int) -> None:
    """Releases idle sessions until `count` KV slots are free, cached prefixes included, or none is left."""
    allocator = runtime.tree.token_to_kv_pool_allocator
    for session in idle_sessions(runtime):
        if allocator.available_size() + runtime.tree.evictable_size() >= count:
            return
        _evict(runtime, session)


def free_row(runtime: Runtime) -> None:
    """Releases the least recently used idle session if no req_to_token row is free."""
    if runtime.scheduler.req_to_token_pool.available_size() == 0:
        idle = idle_sessions(runtime)
        if idle:
            _evict(runtime, idle[0])


def free_locked_prefix(runtime: Runtime) -> bool:
    """Releases the least recently used idle session that locks a prefix in the radix tree; False if there is none.

    Such a prefix is not counted by `reclaimable_tokens`: other sessions may share it.
    """
    slots = runtime.tree.session.slots
    for session in idle_sessions(runtime):
        if slots[session.session_id].kv.cache_protected_len:
            _evict(runtime, session)
            return True
    return False


def take_session_slot(runtime: Runtime) -> int | None:
    """A free session slot; an idle session gives its own up if need be. None: all are in running turns."""
    if runtime.slots.free == 0:
        for session in idle_sessions(runtime):
            record = runtime.sessions.get(session.session_id)
            if record is not None and record.kv is not None:
                _evict(runtime, session)
                break
    return runtime.slots.take()


def session_slots(runtime: Runtime) -> int:
    """Session slots that can be had: the free ones, and those of idle sessions."""
    records = (runtime.sessions.get(session.session_id) for session in idle_sessions(runtime))
    return runtime.slots.free + sum(record is not None and record.kv is not None for record in records)


def _evict(runtime: Runtime, session: Any) -> None:
    logger.debug("session %s gives way", session.session_id[:8])
    runtime.metrics.gave_way()
    release(runtime, session.session_id, "evicted")
