"""After a forward: compress what is due, and settle what a finished or aborted turn leaves behind."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from agentkv_serve.engine import dump, facts, reclaim
from agentkv_serve.engine.admission import prefill_slack
from agentkv_serve.engine.compaction import NoRoomError, choose_budget, compress
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.sessions import FinishedTurn, SessionRecord
from agentkv_serve.engine.turn import Turn, turn_of


def after_step(runtime: Runtime, batch: Any) -> None:
    """After a batch result: compresses running turns that are due (a prefill chunk, or enough decode tokens).

    Under overlap scheduling the next forward of the same requests is running already, and a further prefill chunk may
    be laid out in the row: only the tokens of launched forwards are candidates.
    """
    decodes = batch.forward_mode.is_decode()
    for req in batch.reqs:
        turn = turn_of(req)
        if turn is None or not turn.compresses or req.finished() or not req.kv.holds_kv or req.is_retracted:
            continue
        slack = runtime.config.compress_every if decodes else max(1, prefill_slack(runtime, turn.policy))
        record = runtime.sessions.get(turn.spec.session)
        assert record is not None
        if turn.launched - runtime.start_of(req.kv) >= turn.budget(record, runtime.auto.floor) + slack:
            _compress_running(runtime, record, req, turn)


def finish_turns(runtime: Runtime, reqs: list[Any]) -> None:
    """Before the last frames go out: compresses finished turns, and settles the facts that the frames carry."""
    for req in reqs:
        turn = turn_of(req)
        if turn is None or turn.facts is not None or not req.finished():
            continue
        slot = runtime.tree.session.slots.get(turn.spec.session)
        record = runtime.sessions.get(turn.spec.session)
        if record is None or record.running != req.rid:
            continue
        record.running = None
        if facts.aborted(req) or slot is None or not slot.kv.holds_kv:
            continue
        record.lost = None
        record.labels = turn.labels(req.output_ids, runtime.automata)
        labels = record.labels[: turn.launched]
        budget = turn.budget(record, runtime.auto.floor)
        slack = max(1, min(turn.policy.prefill_slack, runtime.config.compress_every))
        if turn.compresses and turn.policy.compress_prefill and _held(runtime, slot.kv) >= budget + slack:
            with OutsideFreeGroup(runtime.tree.token_to_kv_pool_allocator):
                runtime.settling = record.key
                try:
                    _compress(runtime, record, slot, slot.kv, turn, int(slot.kv.kv_committed_len), labels)
                except NoRoomError:
                    reclaim.release(runtime, record.key, "evicted")
                    continue
                finally:
                    runtime.settling = None
        if record.kv is not None:
            length = int(slot.kv.kv_committed_len)
            if runtime.config.dump_dir:
                dump.turn_end(runtime, record, length, labels)
            record.kv.labels = record.kv.captured_labels(labels)[:length]
        turn.facts = facts.settle(runtime, record, turn, slot.kv, len(turn.prompt) + len(req.output_ids))
        runtime.metrics.turn_ended(record, turn.facts)
        spec = turn.spec
        budget = turn.facts.budget if spec.auto else spec.budget
        record.turns.append(FinishedTurn(spec.epoch, budget, spec.policy, turn.compactions, turn.facts))


def roll_back(runtime: Runtime, req: Any) -> bool:
    """Keeps the session of an aborted turn as it was when the turn began, if the turn compressed nothing yet.

    Mutates the session's record (its tail is freed) and its rings. Returns False where the state cannot be kept; SGLang
    then releases it and the next turn is rebuilt.
    """
    turn = turn_of(req)
    if turn is None or turn.checkpoint is None or not facts.aborted(req):
        return False
    slot = runtime.tree.session.borrowed_slot(req)
    if slot is None:
        return False
    wait_for_forward(runtime)
    kv, committed = slot.kv, turn.checkpoint.committed
    runtime.tree.session._free_kv_aligned(kv, committed, kv.kv_allocated_len)
    kv.kv_allocated_len = committed
    kv.kv_committed_len = committed
    record = runtime.sessions.get(turn.spec.session)
    if turn.checkpoint.rings is not None and record is not None and record.kv is not None:
        runtime.slots.restore_rings(record.kv.slot, turn.checkpoint.rings)
    req.detach_kv()
    req.session.abort_req()
    return True


def retract(runtime: Runtime, req: Any) -> None:
    """A running turn gives its memory back and starts over later: its session's whole state goes, and it says so.

    Stock SGLang would keep the session's row (so nothing would be freed) and take the unfinished turn for the session's
    last good one.
    """
    turn = turn_of(req)
    slot = runtime.tree.session.borrowed_slot(req)
    if turn is None or slot is None:
        return
    del runtime.tree.session.slots[turn.spec.session]
    req.lock, slot.lock = slot.lock, None
    turn.state, turn.reason = "rebuilt", "retracted"
    runtime.metrics.rebuilt("retracted")
    turn.prefill, turn.checkpoint, turn.launched = None, None, 0


def wait_for_forward(runtime: Runtime) -> None:
    """Lets what follows on the device wait for the forward that is running; the next forward waits for what follows.

    Without overlap scheduling all of it is in one stream anyway, and a CPU has none.
    """
    scheduler = runtime.scheduler
    if scheduler.enable_overlap and runtime.shape.device.type != "cpu":
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


def _held(runtime: Runtime, kv: Any) -> int:
    return int(kv.kv_committed_len) - runtime.start_of(kv)


def _compress_running(runtime: Runtime, record: SessionRecord, req: Any, turn: Turn) -> None:
    tree = runtime.tree
    if runtime.scheduler.chunked_req is req and not runtime.start_of(req.kv):
        # Between chunks nothing of the prompt is in the tree yet: publish it before the row becomes a mixture.
        tree.checkpoint(req, up_to=turn.launched)
    holder = tree.session.borrowed_slot(req) or req
    try:
        labels = turn.labels(req.output_ids, runtime.automata)[: turn.launched]
        _compress(runtime, record, holder, req.kv, turn, turn.launched, labels)
    except NoRoomError as error:
        req.to_finish = FINISH_ABORT(f"agentkv:no_room: {error}", HTTPStatus.SERVICE_UNAVAILABLE)


def _compress(
    runtime: Runtime,
    record: SessionRecord,
    holder: Any,
    kv: Any,
    turn: Turn,
    length: int,
    labels: npt.NDArray[np.int8],
) -> None:
    wait_for_forward(runtime)
    budget = turn.spec.budget
    if turn.spec.auto:
        budget = choose_budget(runtime, record, kv, turn.spec.budget, length, labels)
    if compress(runtime, record, holder, kv, budget, length, labels):
        turn.compactions += 1
        turn.checkpoint = None


class OutsideFreeGroup:
    """Runs a block outside the allocator's free group: freed slots must be usable at once."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._grouped = allocator.free_group is not None

    def __enter__(self) -> None:
        if self._grouped:
            self._allocator.free_group_end()

    def __exit__(self, *_: object) -> None:
        if self._grouped:
            self._allocator.free_group_begin()
