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

from agentkv_serve.engine.policies.sampler import KEEP_LAST, Sampler, entry_positions
from agentkv_serve.kernels import capture as capture_kernel
from agentkv_serve.kernels import phase_step

if TYPE_CHECKING:
    from agentkv_serve.engine.runtime import Runtime
    from agentkv_serve.engine.sessions import KvState
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
    first: int  # position of its first token
    rings: npt.NDArray[np.int64]  # [n] ring of every token of the session up to the piece's last; negative = none
    samplers: tuple[Sampler, ...]


def plan_extend(slots: SessionSlots, pieces: list[ExtendPiece]) -> CapturePlan | None:
    """The tokens of each piece whose queries the rings hold after it. Sets the rings' write counts."""
    device = slots.ring.device
    source, slot, place = [], [], []
    for piece in pieces:
        base, counts = 0, []
        for ring, sampler in enumerate(piece.samplers):
            tokens = np.flatnonzero(piece.rings == ring)
            held = sampler.held(len(tokens))
            fresh = np.flatnonzero(held >= np.searchsorted(tokens, piece.first))
            source.append(tokens[held[fresh]] - piece.first + piece.offset)
            slot.append(np.full(len(fresh), piece.slot))
            place.append(fresh + base)
            base += sampler.capacity
            counts.append(len(tokens))
        if counts:
            slots.written[piece.slot, : len(counts)] = torch.tensor(counts).to(device, non_blocking=True)
        slots.last_ring[piece.slot] = int(piece.rings[-1])
    if not source:
        return None
    source_t, slot_t, place_t = (
        torch.from_numpy(np.concatenate(part)).to(device, non_blocking=True) for part in (source, slot, place)
    )
    return CapturePlan(source_t, slot_t, place_t, torch.zeros_like(place_t))


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
    captured = ring >= 0
    ring = ring.clamp(min=0)
    first, newest, strided, stride = slots.layout[slot, ring].unbind(-1)
    number = slots.written[slot, ring]
    slots.written[slot, ring] = number + captured
    # The place of the ring's token `number`, as in `Sampler`.
    passed = (number + 1) // stride
    apart = (number + 1) % stride == 0
    place = first + torch.where(apart, newest + (passed - 1) % strided, (number - passed) % newest)
    return CapturePlan(None, torch.where(captured, slot, 0), place, torch.zeros_like(place))


def ring_positions(
    runtime: Runtime, state: KvState, labels: npt.NDArray[np.int8], length: int
) -> npt.NDArray[np.int64]:
    """[R] position of the token whose query stands at each ring entry of a session, -1 = empty.

    Args:
        labels: of all tokens whose forward was launched. Those beyond `length` do not count, but they have taken the
            places of older ones.
    """
    policy = runtime.policies[state.policy]
    table = policy.ring_table(runtime.config.say_phase)
    where = entry_positions(state.captured_labels(labels), policy.samplers, table, state.uncaptured)
    where[where >= length] = -1
    return where


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


def capture_step(runtime: Runtime, held: list[Tensor], queries: Tensor) -> None:
    """`capture` of a decode step whose layers come in order: all are written when the last one's queries are there.

    Thirty small writes cost a CPU ten times as much as one. A GPU writes each layer's: holding them costs it memory.

    Args:
        held: queries of the step's earlier layers (mutated); the caller empties it before each step.
        queries: [B, Hq, D] post-RoPE queries of the next layer, not changed before the step ends.
    """
    plan = runtime.plan
    if plan is None:
        return
    held.append(queries)
    if len(held) == len(runtime.layer_index):
        capture_kernel.write_layers(runtime.slots.ring, held, plan.slot, plan.zero, plan.place, backend=runtime.backend)
