"""Which worker takes a turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentkv_serve.gateway.errors import ApiError
from agentkv_serve.gateway.routing.registry import Registry
from agentkv_serve.gateway.routing.worker import Worker


def place_pinned(
    registry: Registry, model: str, *, pinned: str, tried: Collection[str] = (), saturated: int | None = None
) -> Worker | None:
    """The pinned worker, if it can serve and has room: as `place` chooses, without a look at the others."""
    worker = registry.get(pinned)
    if worker is None or not _able(worker, model, tried) or (saturated is not None and worker.inflight >= saturated):
        return None
    return worker


def place(
    registry: Registry,
    model: str,
    *,
    pinned: str,
    resident: Mapping[str, int],
    tried: Collection[str] = (),
    saturated: int | None = None,
) -> Worker:
    """The worker for a turn of `model`: the pinned one if it can serve, else the one that holds the fewest KV
    tokens of sessions (`resident`, by worker id), then the fewest running turns.

    Filters come first, in this order: health, breaker, draining, tried; affinity last, so that a pin to a lost worker
    never leaves no candidate. A draining worker keeps the sessions that it has. `saturated`: running turns from which
    a pinned worker is left for one that has room. Raises 503 when no worker can serve.
    """
    able = [w for w in registry if _able(w, model, tried)]
    free = [w for w in able if not w.draining]
    roomy = [w for w in free if saturated is None or w.inflight < saturated]
    for worker in able:
        full = saturated is not None and worker.inflight >= saturated
        if worker.id == pinned and not (full and roomy):
            return worker
    if not free:
        raise ApiError(
            503,
            "no_worker_available",
            "No worker can serve this model right now; try again soon.",
            headers={"retry-after": "2"},
        )
    return min(roomy or free, key=lambda w: (resident.get(w.id, 0) + w.reserved, w.inflight, w.id))


def _able(worker: Worker, model: str, tried: Collection[str]) -> bool:
    return worker.healthy and worker.breaker.allows() and model in worker.models and worker.id not in tried
