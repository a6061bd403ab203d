"""SGLang's radix cache, taught that a compressed row begins with a hole."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from agentkv_serve.engine import progress, reclaim
from agentkv_serve.engine import runtime as runtime_module
from agentkv_serve.engine.turn import turn_of


class AgentKVRadixCache(UnifiedRadixCache):
    """The unified radix cache: shared prefixes stay in the tree; compressed rows are never published to it."""

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Frees row ranges less the hole, whose slots were freed at compression. Every release path ends here."""
        runtime = runtime_module.current()
        start = runtime.start_of(kv) if runtime else 0
        live = [(max(low, start), high) for low, high in ranges if high > start]
        if live:
            super().free_kv_row(kv, live)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publishes a row to the tree unless it is compressed: then it is a per-head mixture that nobody may share."""
        runtime = runtime_module.current()
        if runtime and runtime.start_of(req.kv):
            return
        super().checkpoint(req, up_to=up_to, **kwargs)

    def reset(self) -> None:
        """Drops everything (`/flush_cache`, new weights). Sessions go first, so that no row keeps a window's start."""
        runtime = runtime_module.current()
        if runtime and runtime.scheduler is not None:
            reclaim.release_all(runtime)
        super().reset()

    def claim_kv_row(self, req: Any) -> bool:
        """Where a finished, aborted or retracted turn gives its row up. Returns whether its session keeps the row."""
        runtime = runtime_module.current()
        if runtime and turn_of(req) is not None:
            if not req.finished():
                progress.retract(runtime, req)
                return False
            if progress.roll_back(runtime, req):
                return True
        return bool(super().claim_kv_row(req))
