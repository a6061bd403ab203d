"""Windows made by hand: a session that was compressed once, so that its heads hold different tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from agentkv_serve.engine.policies import Policy, Rope, Window, entry_positions
from agentkv_serve.phase_tagger import Label

LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 3, 8
QUERY_HEADS = KV_HEADS * GROUP
SCALE = 0.4
ROPE = Rope(torch.tensor([1.0, 0.3, 0.05, 0.004]))

# An agent's session in small: opening, then rounds of think, act, tool, say and user text.
PLAN = [(Label.INPUT, 40), (Label.GLUE, 3)]
ROUND = [(Label.THINK, 17), (Label.ACT, 9), (Label.GLUE, 2), (Label.TOOL, 31), (Label.GLUE, 3), (Label.SAY, 8)]
LABELS = np.array([int(label) for label, count in [*PLAN, *ROUND * 3] for _ in range(count)], dtype=np.int8)
LENGTH = len(LABELS)


@dataclass
class Session:
    """Everything that an independent formula needs, as float64 numpy arrays."""

    window: Window
    keys: np.ndarray  # [L, Hkv, N, D]
    values: np.ndarray
    queries: np.ndarray  # [L, R, Hq, D]
    positions: np.ndarray  # [L, Hkv, N]
    where: np.ndarray  # [R] query positions, -1 = empty

    def with_(self, **changes: Any) -> Session:
        return replace(self, window=replace(self.window, **changes))


def session(policy: Policy, *, count: int = 150, keep: int = 100, since: int = 180, seed: int = 0) -> Session:
    """A window of `count` entries, the last ones the newest tokens, the first ones any earlier tokens of each head."""
    rng = np.random.default_rng(seed)
    fresh = LENGTH - since
    old = count - fresh
    positions = np.empty((LAYERS, KV_HEADS, count), dtype=np.int32)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            kept = [*range(32), *sorted(rng.choice(np.arange(32, since), old - 32, replace=False))]
            positions[layer, head] = [*kept, *range(since, LENGTH)]
    where = entry_positions(LABELS, policy.samplers, policy.ring_table())
    queries = rng.standard_normal((LAYERS, len(where), QUERY_HEADS, DIM)).astype(np.float32) * 2
    slots = rng.permutation(3 * count)[:count]
    k_buffers, v_buffers = [], []
    for _ in range(LAYERS):
        k_buffers.append(torch.from_numpy(rng.standard_normal((3 * count, KV_HEADS, DIM)).astype(np.float32)))
        v_buffers.append(torch.from_numpy(rng.standard_normal((3 * count, KV_HEADS, DIM)).astype(np.float32)))
    window = Window(
        k_buffers=k_buffers,
        v_buffers=v_buffers,
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
        queries=torch.from_numpy(queries),
        query_positions=torch.from_numpy(where),
        labels=torch.from_numpy(LABELS),
        length=LENGTH,
        since=since,
        keep=keep,
        scale=SCALE,
        rope=ROPE,
        seed=seed,
    )

    def dense(buffers: list[torch.Tensor]) -> np.ndarray:
        return np.stack([buffer[slots].numpy().transpose(1, 0, 2) for buffer in buffers]).astype(np.float64)

    return Session(window, dense(k_buffers), dense(v_buffers), queries.astype(np.float64), positions, where)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis; a row of -inf is all 0."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = np.nan_to_num(weights)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def causal(made: Session, layer: int, head: int, entry: int) -> np.ndarray:
    """[N] attention of one ring entry's query, the mean over the group of one KV head."""
    rows = []
    for member in range(GROUP):
        query = made.queries[layer, entry, head * GROUP + member]
        logits = made.keys[layer, head] @ query * SCALE
        logits[made.positions[layer, head] > made.where[entry]] = -np.inf
        rows.append(softmax(logits))
    return np.mean(rows, axis=0)


def union_mass(made: Session, layer: int, head: int, entries: list[int], count: int, pool: int) -> np.ndarray:
    """[count] AgentKV's score over the first `count` entries: group maximum, softmax, mean, max-pool."""
    rows = []
    for entry in entries:
        logits = [
            made.keys[layer, head, :count] @ made.queries[layer, entry, head * GROUP + member] * SCALE
            for member in range(GROUP)
        ]
        rows.append(softmax(np.max(logits, axis=0)))
    mass = np.mean(rows, axis=0)
    return np.array([mass[max(0, i - pool // 2) : i + pool // 2 + 1].max() for i in range(count)])
