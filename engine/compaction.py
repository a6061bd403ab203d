"""Compress a session's KV in place: score, select, move the kept tokens to the row's tail, free the rest.

The window layout: everything that the scheduler knows stays logical. After a compression of L tokens to B the kept
keys and values of every head lie in row positions [L-B, L); [0, L-B) is a hole whose slots were freed. RoPE stays
right, since every key was rotated at its true position.
"""

from __future__ import annotations

import logging
import time
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentkv_serve.engine import dump
from agentkv_serve.engine.capture import ring_positions
from agentkv_serve.engine.policies import Window
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.sessions import Compaction, KvState, SessionRecord
from agentkv_serve.kernels import compact

logger = logging.getLogger(__name__)


class NoRoomError(RuntimeError):
    """The slots to copy a shared prefix out of the tree cannot be had: the session must be released."""


def window_positions(kv: KvState, shape: tuple[int, int], length: int, device: torch.device) -> Tensor:
    """[L, Hkv, N] int32 logical positions of the window's entries.

    Args:
        shape: (layers, KV heads).
        length: L, tokens with KV so far; the window is [start, L).
    """
    kept = 0 if kv.kept is None else kv.kept.shape[-1]
    tail = torch.arange(kv.start + kept, length, dtype=torch.int32, device=device).expand(*shape, -1)
    return tail if kv.kept is None else torch.cat((kv.kept, tail), dim=-1)


def compress(
    runtime: Runtime,
    record: SessionRecord,
    holder: Any,
    kv: Any,
    budget: int,
    length: int,
    labels: npt.NDArray[np.int8],
) -> bool:
    """Compresses a session's record to its budget. Returns whether anything was done.

    Mutates the KV pool, the req_to_token row, the allocator, and the tree lock of `holder` (SGLang's session slot or
    request): the shared prefix in the radix tree is only read, copied out of, and unlocked.

    Args:
        kv: SGLang's `ReqKvInfo` of the session.
        budget: KV tokens per layer and KV head to keep. With pages, up to page - 1 more stay.
        length: L, the session's tokens whose keys and values are in the pool or on their way there. The row may hold
            more: slots of a prefill chunk that comes next.
        labels: [L or more] fine label of every token whose forward was launched.

    Raises:
        NoRoomError: the shared prefix is unlocked and the row may not be used again; release the session.
    """
    state = record.kv
    if state is None:
        raise RuntimeError(f"session {record.key[:8]} has no KV state to compress")
    began = time.perf_counter()
    mark = runtime.metrics.mark(runtime.shape.device)
    allocator = runtime.tree.token_to_kv_pool_allocator
    page = allocator.page_size
    start, shared = state.start, kv.cache_protected_len
    new_start = (length - budget) // page * page
    if new_start <= start:
        return False
    row = runtime.req_to_token[kv.req_pool_idx]
    source = row[start:length].to(torch.int64)  # a copy: the row is rewritten below
    window = session_window(runtime, record, source, length, length - new_start, labels)
    choice = runtime.policies[state.policy].choose(window)
    kept = choice.kept

    staged = None
    if new_start < shared:
        fresh = _allocate(runtime, shared - new_start)
        if fresh is None:
            # The shared prefix itself holds the slots that its copy needs: carry the kept rows outside the pool while
            # the prefix is unlocked and evicted.
            staged = _stage(window, kept)
            _unlock(runtime, holder, kv)
            fresh = _allocate(runtime, shared - new_start)
            if fresh is None:
                kv.cache_protected_len = shared
                raise NoRoomError(
                    f"{shared - new_start} KV slots are needed to copy a shared prefix, and none can be freed"
                )
        row[new_start:shared] = fresh.to(row.dtype)
    target = row[new_start:length].to(torch.int64)
    if staged is None:
        compact.gather_write(
            window.k_buffers, window.v_buffers, source, kept, target, shifted=True, backend=runtime.backend
        )
        if shared:
            _unlock(runtime, holder, kv)
    else:
        for buffer, rows in zip((*window.k_buffers, *window.v_buffers), staged, strict=True):
            buffer[target] = rows
    state.kept = window.positions.gather(-1, kept)
    state.carry, state.since = choice.carry, length
    first_owned = max(start, shared)
    if new_start > first_owned:
        allocator.free(source[first_owned - start : new_start - start])
    row[:new_start] = 0
    state.start = new_start
    runtime.slots.start[kv.req_pool_idx] = new_start
    record.compactions.append(Compaction(record.epoch, length, length - start, length - new_start))
    runtime.metrics.compacted(mark)
    if runtime.config.dump_dir:
        dump.compaction(runtime, record, window, start)
    logger.debug(
        "session %s: %d tokens, window %d -> %d, %.1f ms",
        record.key[:8],
        length,
        length - start,
        length - new_start,
        (time.perf_counter() - began) * 1e3,
    )
    return True


def choose_budget(
    runtime: Runtime, record: SessionRecord, kv: Any, cap: int, length: int, labels: npt.NDArray[np.int8]
) -> int:
    """Budget auto: the smallest budget that is predicted to lose little, noted as the one in force.

    Where nothing can go, what the session holds is noted instead, so that it is asked again as it grows. Arguments as
    in `compress`.
    """
    state = record.kv
    assert state is not None
    source = runtime.req_to_token[kv.req_pool_idx, state.start : length].to(torch.int64)
    window = session_window(runtime, record, source, length, min(cap, len(source)), labels)
    budget = runtime.auto.choose(runtime.policies[state.policy], window, min(cap, len(source)), pressure(runtime))
    if runtime.ranks is not None:
        # Each rank asked its own heads. All must free the same slots: the most demanding one decides.
        most = torch.tensor([budget])
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=runtime.ranks.cpu_group)
        budget = int(most)
    state.budget = budget
    return budget


CROWDED = 0.75
"""Share of the KV pool from which on budgets of `auto` sink."""


def pressure(runtime: Runtime) -> float:
    """0 = at most `CROWDED` of the pool's slots are in use, 1 = none is free."""
    allocator = runtime.tree.token_to_kv_pool_allocator
    free = allocator.available_size() + runtime.tree.evictable_size()
    used = 1 - free / runtime.scheduler.max_total_num_tokens
    return float(max(0.0, (used - CROWDED) / (1 - CROWDED)))


def session_window(
    runtime: Runtime, record: SessionRecord, source: Tensor, length: int, keep: int, labels: npt.NDArray[np.int8]
) -> Window:
    """The window that a policy sees of a session.

    Args:
        source: [N] pool slots of its row, from the first valid one.
        length, labels: as in `compress`. keep: entries that will stay.
    """
    state = record.kv
    assert state is not None
    layers = runtime.shape.attention_layers
    positions = window_positions(state, (len(layers), runtime.shape.kv_heads), length, source.device)
    policy = runtime.policies[state.policy]
    where = ring_positions(runtime, state, labels, length)
    carry = state.carry
    if carry is not None:
        carry = torch.cat((carry, carry.new_zeros(*carry.shape[:2], positions.shape[-1] - carry.shape[-1])), -1)
    return Window(
        k_buffers=[runtime.kv_pool.get_key_buffer(layer) for layer in layers],
        v_buffers=[runtime.kv_pool.get_value_buffer(layer) for layer in layers],
        slots=source,
        positions=positions,
        queries=runtime.slots.ring[state.slot, :, 0, : policy.ring_queries],
        query_positions=torch.from_numpy(where),
        labels=torch.from_numpy(state.captured_labels(labels)[:length]),
        carry=carry,
        length=length,
        since=state.since,
        budget=state.budget,
        keep=keep,
        scale=runtime.shape.scale,
        rope=runtime.rope,
        seed=zlib.crc32(record.key.encode()) + (length << 32),
        backend=runtime.backend,
    )


def _allocate(runtime: Runtime, count: int) -> Tensor | None:
    """Slots to copy a shared prefix into; cached prefixes and idle sessions give way. None: there is no room."""
    allocator = runtime.tree.token_to_kv_pool_allocator
    allocator.evict_to_free_tokens(runtime.tree, count)
    slots: Tensor | None = allocator.alloc(count)
    return slots


def _unlock(runtime: Runtime, holder: Any, kv: Any) -> None:
    """Lets go of the shared prefix: the session's row is its own from here on."""
    runtime.tree.unlock(holder.lock)
    holder.lock = None
    kv.cache_protected_len = 0
    kv.cache_inserted_len = 0
    if hasattr(holder, "publishes_prompt"):
        holder.publishes_prompt = False


def _stage(window: Window, kept: Tensor) -> list[Tensor]:
    """Copies of the kept rows of every K buffer, then of every V buffer, each [B, Hkv, D]."""
    staged = []
    for buffers in (window.k_buffers, window.v_buffers):
        for layer, buffer in enumerate(buffers):
            rows = kept[layer].T[:, :, None].expand(-1, -1, buffer.shape[-1])
            staged.append(buffer[window.slots].gather(0, rows))
    return staged
