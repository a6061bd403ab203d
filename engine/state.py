"""Device state of live compressed sessions, in pools that are allocated once.

Slot 0 is a dummy: rows without a compressed session, and padded rows of a CUDA graph, read and write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv_serve.engine.policies.sampler import NO_RING, Sampler
from agentkv_serve.phase_tagger import Label


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the attention that this rank runs. Layers without attention do not count."""

    attention_layers: tuple[int, ...]  # layer ids, ascending
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device

    def token_bytes(self) -> int:
        """Bytes of keys and values of one token over all layers and KV heads of this rank."""
        return len(self.attention_layers) * self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Rings:
    """A copy of one session's query rings."""

    ring: Tensor  # [L, 1, R, Hq, D]
    written: Tensor  # [rings]
    last_ring: Tensor  # []


class SessionSlots:
    """Query rings and decode automaton of each live compressed session, by session slot; window starts, by row.

    ring       [slots, L, 1, R, Hq, D]   post-RoPE queries, the entries of ring 0 first, then those of ring 1, …
    written    [slots, rings] int64      queries ever written to each ring
    layout     [slots, rings, 4] int64   first entry of each ring, then its sampler's newest, strided, stride
    automaton  [slots] int64             state of the decode automaton
    last_ring  [slots] int64             ring of the newest token (for labels that keep the last one)
    table      [slots, 6] int64          ring of each fine label; negative: its queries are not kept
    row_slot   [rows] int64              session slot of each req_to_token row, 0 = none
    start      [rows] int64              first valid position of each row: the window is row[start:L]

    The pools are as wide as the largest policy needs that the worker serves.
    """

    def __init__(self, shape: ModelShape, *, rows: int, slots: int, ring_queries: int, rings: int = 4) -> None:
        device = shape.device
        self.shape = shape
        layers = len(shape.attention_layers)
        self.ring = torch.zeros(
            (slots + 1, layers, 1, max(1, ring_queries), shape.query_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        self.written = torch.zeros((slots + 1, max(1, rings)), dtype=torch.int64, device=device)
        self.layout = torch.zeros((*self.written.shape, 4), dtype=torch.int64, device=device)
        self.layout[:] = self.layout.new_tensor((0, *Sampler(1).layout))  # place 0 where nothing is kept
        self.automaton = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.last_ring = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.table = torch.zeros((slots + 1, len(Label)), dtype=torch.int64, device=device)
        self.row_slot = torch.zeros(rows, dtype=torch.int64, device=device)
        self.start = torch.zeros(rows, dtype=torch.int64, device=device)
        self._free = list(range(slots, 0, -1))

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        pools = (
            self.ring,
            self.written,
            self.layout,
            self.automaton,
            self.last_ring,
            self.table,
            self.row_slot,
            self.start,
        )
        return sum(pool.numel() * pool.element_size() for pool in pools)

    @property
    def free(self) -> int:
        """Session slots that nobody holds."""
        return len(self._free)

    def take(self) -> int | None:
        """A free slot with empty rings, or None."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.clear(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Frees a slot. Its old content is never read again: `clear` runs at the next `take`."""
        self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Empties the rings of a slot (in place)."""
        self.written[slot] = 0
        self.automaton[slot] = 0
        self.last_ring[slot] = 0

    def lay_out(self, slot: int, samplers: tuple[Sampler, ...], table: tuple[int, ...]) -> None:
        """Gives a slot the rings of a policy (in place). Labels whose ring has no sampler are not kept."""
        rows, first = [], 0
        for sampler in samplers:
            rows.append((first, *sampler.layout))
            first += sampler.capacity
        device = self.layout.device
        if rows:
            self.layout[slot, : len(rows)] = torch.tensor(rows).to(device, non_blocking=True)
        rings = [ring if ring < len(samplers) else NO_RING for ring in table]
        self.table[slot] = torch.tensor(rings).to(device, non_blocking=True)

    def copy_rings(self, slot: int) -> Rings:
        """A copy of a session's rings, to restore after an abort."""
        return Rings(self.ring[slot].clone(), self.written[slot].clone(), self.last_ring[slot].clone())

    def restore_rings(self, slot: int, rings: Rings) -> None:
        """Puts a copy back (in place)."""
        self.ring[slot] = rings.ring
        self.written[slot] = rings.written
        self.last_ring[slot] = rings.last_ring
