"""Before a forward: which session slot each row belongs to, and which prompt queries are captured."""

from __future__ import annotations

from typing import Any

from agentkv_serve.engine import forced, reclaim
from agentkv_serve.engine.capture import ExtendPiece, plan_extend
from agentkv_serve.engine.policies.sampler import NO_RING, rings_of
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.sessions import KvState
from agentkv_serve.engine.turn import Checkpoint, Turn, turn_of


def plan_forward(runtime: Runtime, batch: Any, extends: bool) -> None:
    """Before a forward: binds new rows to session slots, and plans which prompt queries are captured."""
    runtime.plan = None
    runtime.force_window = False
    runtime.starts = [runtime.start_of(req.kv) for req in batch.reqs or ()]
    pieces, given = [], []
    offset = 0
    for index, req in enumerate(batch.reqs or ()):
        turn = turn_of(req)
        count = batch.extend_lens[index] if extends else 1
        if turn is not None:
            runtime.force_window |= turn.spec.force_window
            turn.launched = batch.prefix_lens[index] + count if extends else req.kv.kv_committed_len
            if turn.spec.force_ids and (number := forced.next_id(turn)) is not None:
                given.append((index, number))
            if extends:
                piece = _extend_piece(runtime, req, turn, batch.prefix_lens[index], count, offset)
                if piece is not None:
                    pieces.append(piece)
        offset += count
    runtime.forced = forced.gather(given, runtime.shape.device)
    if pieces:
        runtime.plan = plan_extend(runtime.slots, pieces)


def _extend_piece(runtime: Runtime, req: Any, turn: Turn, prefix: int, count: int, offset: int) -> ExtendPiece | None:
    state = _bind(runtime, req, turn, prefix) if turn.compresses else _bound(runtime, turn)
    if turn.prefill is None:
        turn.prefill = len(turn.prompt) - prefix
        if turn.state == "resumed":
            rings = runtime.slots.copy_rings(state.slot) if state else None
            turn.checkpoint = Checkpoint(prefix, rings)
    if state is None:
        return None
    runtime.slots.automaton[state.slot] = turn.automaton
    policy = runtime.policies[state.policy]
    labels = state.captured_labels(turn.labels(req.output_ids, runtime.automata))[: prefix + count]
    of_token = rings_of(labels, policy.ring_table(runtime.config.say_phase))
    of_token[: state.uncaptured] = NO_RING
    return ExtendPiece(state.slot, offset, prefix, of_token, policy.samplers)


def _bind(runtime: Runtime, req: Any, turn: Turn, prefix: int) -> KvState:
    """The session's KV state on the request's row; takes a session slot at the first turn that compresses."""
    record = runtime.sessions.get(turn.spec.session)
    if record is None:
        raise RuntimeError(f"session {turn.spec.session[:8]} vanished while its turn was waiting")
    row = req.kv.req_pool_idx
    slots = runtime.slots
    if record.kv is None:
        slot = reclaim.take_session_slot(runtime)
        if slot is None:
            raise RuntimeError("no session slot is free, though admission counted one")
        runtime.sessions.bind(record, KvState(row=row, slot=slot, policy=turn.policy.name, uncaptured=prefix))
        slots.row_slot[row] = slot
        _lay_out(runtime, slot, turn)
    state = record.kv
    assert state is not None and state.row == row
    if state.policy != turn.policy.name:
        state.policy, state.carry, state.uncaptured = turn.policy.name, None, prefix
        slots.clear(state.slot)
        _lay_out(runtime, state.slot, turn)
    return state


def _lay_out(runtime: Runtime, slot: int, turn: Turn) -> None:
    runtime.slots.lay_out(slot, turn.policy.samplers, turn.policy.ring_table(runtime.config.say_phase))


def _bound(runtime: Runtime, turn: Turn) -> KvState | None:
    """The KV state of a session that this turn will not compress: its queries are captured as before."""
    record = runtime.sessions.get(turn.spec.session)
    return None if record is None else record.kv
