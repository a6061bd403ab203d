"""Which worker takes a turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.routing.registry import Registry
from agentkv_serve.gateway.routing.worker import Worker


def place(
    registry: Registry,
    model: str,
    *,
    pinned: str,
    resident: Mapping[str, int],
    tried: Collection[str] = (),
) -> Worker:
    """The worker for a turn of `model`: the pinned one if it can serve, else the one that holds the fewest KV
    tokens of sessions (`resident`, by worker id), then the fewest running turns.

    Filters stand before affinity, so that a pin to a lost worker never leaves no candidate. A draining worker keeps
    the sessions that it has. Raises 503 when no worker can serve.
    """
    able = [w for w in registry if w.healthy and model in w.models and w.id not in tried]
    for worker in able:
        if worker.id == pinned:
            return worker
    free = [w for w in able if not w.draining]
    if not free:
        raise ApiError(
            503,
            "no_worker_available",
            "No worker can serve this model right now; try again soon.",
            headers={"retry-after": "2"},
        )
    return min(free, key=lambda w: (resident.get(w.id, 0) + w.reserved, w.inflight, w.id))
