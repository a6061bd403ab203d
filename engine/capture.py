"""Which queries of a forward go where in the session rings.

Prompt labels are known on the host, so an extend's plan is made there. A decode step's plan is made on the device from
the input ids alone: under overlap scheduling the host does not know them yet, and a CUDA graph must not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentkv_serve.engine.policies.base import KEEP_LAST
from agentkv_serve.kernels import capture as capture_kernel
from agentkv_serve.kernels import phase_step

if TYPE_CHECKING:
    from agentkv_serve.engine.runtime import Runtime
    from agentkv_serve.engine.state import SessionSlots


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Rows of a forward's query tensor and their places in the rings. All [T] int64 on the device."""

    source: Tensor | None  # rows of the query tensor; None = all, in order
    slot: Tensor
    place: Tensor  # flat ring entry
    zero: Tensor  # zeros: a session's rings of all phases share one axis


@dataclass(slots=True)
class ExtendPiece:
    """One request's part of an extend batch."""

    slot: int
    offset: int  # its first row in the batch's query tensor
    labels: npt.NDArray[np.int8]  # [n] labels of the tokens that are extended
    table: tuple[int, ...]
    capacity: int
    last_ring: int = 0


def rings_of(labels: npt.NDArray[np.int8], table: tuple[int, ...], last: int) -> npt.NDArray[np.int64]:
    """[n] ring of each token; labels that keep the last ring take the one of the token before (at first, `last`)."""
    rings = np.asarray(table, dtype=np.int64)[labels]
    known = rings != KEEP_LAST
    if known.all():
        return rings
    source = np.maximum.accumulate(np.where(known, np.arange(len(rings)), -1))
    return np.where(source >= 0, rings[source], last)


def plan_extend(slots: SessionSlots, pieces: list[ExtendPiece]) -> CapturePlan | None:
    """The newest `capacity` tokens of each ring in each piece. Advances the rings' write counts."""
    source, slot, ring, rank = [], [], [], []
    for piece in pieces:
        rings = rings_of(piece.labels, piece.table, piece.last_ring)
        for number in np.unique(rings):
            newest = np.flatnonzero(rings == number)[-piece.capacity :]
            source.append(newest + piece.offset)
            slot.append(np.full(len(newest), piece.slot))
            ring.append(np.full(len(newest), number))
            rank.append(np.arange(len(newest)))
        slots.last_ring[piece.slot] = int(rings[-1])
    if not source:
        return None
    device = slots.ring.device
    columns = [torch.from_numpy(np.concatenate(part)).to(device) for part in (source, slot, ring, rank)]
    source_t, slot_t, ring_t, rank_t = columns
    capacity = slots.capacity[slot_t]
    place = ring_t * capacity + (slots.written[slot_t, ring_t] + rank_t) % capacity
    slots.written.index_put_((slot_t, ring_t), torch.ones_like(ring_t), accumulate=True)
    return CapturePlan(source_t, slot_t, place, torch.zeros_like(place))


def plan_decode(runtime: Runtime, rows: Tensor, input_ids: Tensor) -> CapturePlan:
    """One query per row: steps the automaton of each row's session by its input token. No host round trip.

    Args:
        rows: [B] req_to_token rows; rows without a compressed session use the dummy slot.
        input_ids: [B] the tokens that this step runs.
    """
    slots, automata = runtime.slots, runtime.automata
    slot = slots.row_slot[rows]
    ids = input_ids.to(torch.int64).clamp(max=automata.next.shape[1] - 1)
    label, state = phase_step.step(automata.next, automata.label, slots.automaton[slot], ids, backend=runtime.backend)
    slots.automaton[slot] = state
    ring = slots.table[slot, label.to(torch.int64)]
    ring = torch.where(ring == KEEP_LAST, slots.last_ring[slot], ring)
    slots.last_ring[slot] = ring
    capacity = slots.capacity[slot]
    place = ring * capacity + slots.written[slot, ring] % capacity
    slots.written[slot, ring] = slots.written[slot, ring] + 1
    return CapturePlan(None, slot, place, torch.zeros_like(place))


def capture(runtime: Runtime, layer_id: int, queries: Tensor) -> None:
    """Writes the planned queries of one layer into the rings (in place).

    Args:
        queries: [T, Hq, D] post-RoPE queries of the running forward.
    """
    plan = runtime.plan
    if plan is None:
        return
    rows = queries if plan.source is None else queries[plan.source]
    capture_kernel.write(
        runtime.slots.ring,
        runtime.layer_index[layer_id],
        rows,
        plan.slot,
        plan.zero,
        plan.place,
        backend=runtime.backend,
    )
