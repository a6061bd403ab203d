"""Device state of live compressed sessions, in pools that are allocated once.

Slot 0 is a dummy: rows without a compressed session, and padded rows of a CUDA graph, read and write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    written: Tensor  # [4]
    last_ring: Tensor  # []


class SessionSlots:
    """Query rings and decode automaton of each live compressed session, by session slot; window starts, by row.

    ring       [slots, L, 1, R, Hq, D]  post-RoPE queries, FIFO per ring (R = rings x capacity entries)
    written    [slots, 4] int64         queries ever written to each ring
    automaton  [slots] int64            state of the decode automaton
    last_ring  [slots] int64            ring of the newest token (for labels that keep the last one)
    table      [slots, 6] int64         ring of each fine label
    capacity   [slots] int64            entries per ring
    row_slot   [rows] int64             session slot of each req_to_token row, 0 = none
    start      [rows] int64             first valid position of each row: the window is row[start:L]
    """

    def __init__(self, shape: ModelShape, *, rows: int, slots: int, ring_queries: int) -> None:
        device = shape.device
        self.shape = shape
        self.ring_queries = ring_queries
        layers = len(shape.attention_layers)
        self.ring = torch.zeros(
            (slots + 1, layers, 1, ring_queries, shape.query_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        self.written = torch.zeros((slots + 1, 4), dtype=torch.int64, device=device)
        self.automaton = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.last_ring = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.table = torch.zeros((slots + 1, len(Label)), dtype=torch.int64, device=device)
        self.capacity = torch.ones(slots + 1, dtype=torch.int64, device=device)
        self.row_slot = torch.zeros(rows, dtype=torch.int64, device=device)
        self.start = torch.zeros(rows, dtype=torch.int64, device=device)
        self._free = list(range(slots, 0, -1))

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        pools = (
            self.ring,
            self.written,
            self.automaton,
            self.last_ring,
            self.table,
            self.capacity,
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

    def valid_queries(self, slot: int, capacity: int, rings: int) -> Tensor:
        """[R] bool: which ring entries of a slot hold a query."""
        place = torch.arange(self.ring_queries, device=self.written.device)
        ring = (place // capacity).clamp(max=self.written.shape[1] - 1)
        return (place < rings * capacity) & (place % capacity < self.written[slot, ring])

    def unwrite(self, slot: int, count: int) -> None:
        """Takes back the newest `count` writes of the newest token's ring (in place, no host round trip)."""
        self.written[slot].index_add_(0, self.last_ring[slot : slot + 1], self.written.new_full((1,), -count))

    def copy_rings(self, slot: int) -> Rings:
        """A copy of a session's rings, to restore after an abort."""
        return Rings(self.ring[slot].clone(), self.written[slot].clone(), self.last_ring[slot].clone())

    def restore_rings(self, slot: int, rings: Rings) -> None:
        """Puts a copy back (in place)."""
        self.ring[slot] = rings.ring
        self.written[slot] = rings.written
        self.last_ring[slot] = rings.last_ring
