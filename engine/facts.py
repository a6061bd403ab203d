"""What a turn's last frame says: the engine's own count of what it holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from agentkv_serve.engine.compaction import window_positions
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.sessions import SessionRecord
from agentkv_serve.engine.turn import Turn
from agentkv_serve.engine.wire import Facts
from agentkv_serve.phase_tagger import Label, Phase, fold


def aborted(req: Any) -> bool:
    """Whether a finished request ended by an abort or an error."""
    reason = req.finished_reason.to_json() if req.finished_reason is not None else {}
    return bool(reason.get("type") == "abort")


def settle(runtime: Runtime, record: SessionRecord, turn: Turn, kv: Any, logical: int) -> Facts:
    """The facts of a finished turn, from the session's record as it is now.

    Args:
        kv: SGLang's KV record of the session; its committed length is the number of tokens with keys and values.
        logical: tokens of the session, the last sampled one included (it has no keys and values yet).
    """
    length = int(kv.kv_committed_len)
    start = runtime.start_of(kv)
    return Facts(
        state=turn.state,
        reason=turn.reason,
        logical=logical,
        held=length - start,
        evicted=start,
        prefill=turn.prefill or 0,
        phases=phase_counts(runtime, record, length),
        budget=turn.budget(record, runtime.auto.floor) if turn.compresses else 0,
    )


def phase_counts(runtime: Runtime, record: SessionRecord, length: int) -> dict[str, float]:
    """Kept (layer, KV head, token) entries of each phase, divided by layers x KV heads. Sums to the held tokens."""
    assert record.labels is not None
    phases = np.asarray([int(fold(label)) for label in Label], dtype=np.int64)[record.labels[:length]]
    if record.kv is None or record.kv.kept is None:
        counts = np.bincount(phases, minlength=len(Phase)).astype(np.float64)
    else:
        shape = (len(runtime.shape.attention_layers), runtime.shape.kv_heads)
        positions = window_positions(record.kv, shape, length, runtime.shape.device)
        of_entry = torch.from_numpy(phases).to(positions.device)[positions.to(torch.int64)]
        mean = torch.bincount(of_entry.flatten(), minlength=len(Phase)).cpu().double() / (shape[0] * shape[1])
        if runtime.ranks is not None:  # each rank has heads of its own, and all of them end this turn now
            torch.distributed.all_reduce(mean, group=runtime.ranks.cpu_group)
            mean /= runtime.ranks.world_size
        counts = mean.numpy()
    return {phase.name.lower(): round(float(counts[phase]), 3) for phase in Phase}
