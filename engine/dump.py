"""For tests: what a compression saw and kept, and what the query rings hold at turn end, as files of arrays.

Written only when the launcher's environment has `AGENTKV_DUMP=DIR`; names sort in order of time. Rank 0 writes there,
rank N of a tensor-parallel engine under the same names into its folder `rankN`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentkv_serve.engine.capture import ring_positions

if TYPE_CHECKING:
    from agentkv_serve.engine.policies import Window
    from agentkv_serve.engine.runtime import Runtime
    from agentkv_serve.engine.sessions import SessionRecord


def compaction(runtime: Runtime, record: SessionRecord, window: Window, old_start: int) -> None:
    """One compression: kept logical positions [L, Hkv, K], window bounds, the pool slots that the row still holds, and
    the rings that were scored with."""
    state = record.kv
    assert state is not None and state.kept is not None and window.query_positions is not None
    _write(
        runtime,
        record,
        "",
        window.query_positions.numpy(),
        length=window.length,
        old_start=old_start,
        start=state.start,
        prefix=state.uncaptured,
        kept=state.kept.cpu().numpy(),
        slots=runtime.req_to_token[state.row, state.start : window.length].cpu().numpy(),
    )


def turn_end(runtime: Runtime, record: SessionRecord, length: int, labels: npt.NDArray[np.int8]) -> None:
    """The rings of a session at the end of a turn. labels: of all tokens whose forward was launched."""
    if record.kv is not None:
        _write(runtime, record, "ring-", ring_positions(runtime, record.kv, labels, length), length=length)


def _write(runtime: Runtime, record: SessionRecord, kind: str, where: npt.NDArray[np.int64], **arrays: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    rank = get_parallel().tp_rank
    state = record.kv
    assert state is not None
    queries = runtime.slots.ring[state.slot, :, 0, : len(where)].float().cpu().numpy()
    samplers = runtime.policies[state.policy].samplers
    alike = len({sampler.capacity for sampler in samplers}) == 1
    shape = (len(samplers), samplers[0].capacity) if alike else (1, len(where))
    folder = Path(runtime.config.dump_dir, f"rank{rank}" if rank else "")
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / f"{kind}{runtime.dumped:06d}-{record.key[:16]}.npz",
        session=record.key,
        queries=queries.reshape(queries.shape[0], *shape, *queries.shape[2:]),
        valid=(where >= 0).reshape(shape),
        query_positions=where.reshape(shape),
        **arrays,
    )
    runtime.dumped += 1
