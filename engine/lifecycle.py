"""From a request to a turn of a session, and from a batch result to compressions. Called by the hooks."""

from __future__ import annotations

import logging
from array import array
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from agentkv_serve.engine import admission, dump, facts, reclaim
from agentkv_serve.engine.capture import ExtendPiece, plan_extend
from agentkv_serve.engine.compaction import NoRoomError, compress
from agentkv_serve.engine.policies import get_policy
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.sessions import KvState, SessionRecord
from agentkv_serve.engine.turn import ATTRIBUTE, Checkpoint, Turn, turn_of
from agentkv_serve.engine.wire import TurnSpec, WireError, parse_turn

logger = logging.getLogger(__name__)


def begin_turn(runtime: Runtime, request: Any) -> Turn | None:
    """Turns a full-prompt request into a streaming-session turn when the session's tokens are its prefix.

    Mutates `request` (SGLang's `TokenizedGenerateReqInput`): `input_ids` becomes the new tokens only. A session whose
    tokens are no prefix of the request is released and starts afresh, so foreign state can never be used.

    Returns:
        The turn, to be hung on the request that SGLang creates; None if the request is none of ours.

    Raises:
        WireError: the turn is refused; nothing was changed.
        BusySessionError: a later epoch than the running turn's; nothing was changed.
    """
    prompt = array("q", request.input_ids)
    spec = parse_turn(request.sampling_params.custom_params, len(prompt))
    if spec is None:
        return None
    try:
        policy = get_policy(spec.policy)
        initial = runtime.automata.initial(spec.family, spec.initial)
    except KeyError as error:
        raise WireError("bad_request", str(error.args[0])) from None
    if policy.compresses and spec.budget:
        least = policy.sinks + policy.recent + 1
        if spec.budget < least:
            raise WireError("budget", f"budget {spec.budget} is below {least}, the least that {policy.name} can keep")
    record = runtime.sessions.fence(spec)
    controller = runtime.scheduler.session_controller
    session = controller.get(spec.session)
    if session is not None and session._inflight:
        if record is not None and record.running and spec.epoch > record.epoch:
            raise BusySessionError(record.running)
        raise WireError("session_busy", "the session's last turn is still running: wait for its end, or abort it")
    turn = Turn(spec=spec, policy=policy, prompt=prompt, initial=initial)
    admission.refuse_oversized(runtime, turn, len(prompt), runtime.uncompressed_limit)
    record = runtime.sessions.admit(spec)
    if session is not None:
        turn.reason = _resume(runtime, session, spec, request, prompt)
        if turn.reason is None:
            turn.state = "resumed"
        else:
            reclaim.release(runtime, spec.session, turn.reason)
            session = None
    if session is None:
        turn.reason = record.lost
        turn.state = "rebuilt" if record.lost else "new"
        controller.open(
            OpenSessionReqInput(
                capacity_of_str_len=1 << 30,
                session_id=spec.session,
                streaming=True,
                timeout=runtime.config.idle_seconds,
            )
        )
    record.running = request.rid
    request.session_params = SessionParams(id=spec.session)
    return turn


def _resume(runtime: Runtime, session: Any, spec: TurnSpec, request: Any, prompt: Any) -> str | None:
    """Cuts the request to its new tokens if the session's state continues in it; else says why it does not."""
    history = session_tokens(session)
    slot = runtime.tree.session.slots.get(spec.session)
    if not history or slot is None or not slot.kv.holds_kv:
        return "aborted"
    if spec.rebuild:
        return "requested"
    if len(prompt) <= len(history) or prompt[: len(history)] != history:
        return "diverged"
    request.input_ids = prompt[len(history) :]
    return None


def session_tokens(session: Any) -> Any:
    """array("q") of all tokens that an SGLang session has committed: prompts and sampled tokens."""
    if not session.req_nodes:
        return array("q")
    last = next(iter(session.req_nodes.values())).req
    sampled = last.output_ids[: last.sampling_params.max_new_tokens]
    return array("q", last.origin_input_ids[: session.committed_origin_len]) + array("q", sampled)


def attach(turn: Turn, req: Any) -> None:
    """Hangs a turn on the request that SGLang made of it.

    Raises:
        RuntimeError: SGLang's ids are not the request's; the turn must not run.
    """
    if array("q", req.origin_input_ids) != turn.prompt:
        raise RuntimeError(
            f"session {turn.spec.session[:8]}: SGLang assembled {len(req.origin_input_ids)} tokens that are not the "
            f"request's {len(turn.prompt)}"
        )
    setattr(req, ATTRIBUTE, turn)


def refuse(scheduler: Any, request: Any, error: WireError) -> None:
    """Answers a request with an error, without running anything."""
    from sglang.srt.disaggregation.utils import prepare_abort

    req = scheduler._create_generation_req(
        request,
        request.rid,
        request.input_text,
        request.input_ids,
        request.sampling_params,
        stream=request.stream,
        vocab_size=scheduler.model_config.vocab_size,
        http_worker_ipc=request.http_worker_ipc,
        time_stats=request.time_stats,
    )
    req.tokenizer = scheduler.tokenizer
    prepare_abort(req, str(error), status_code=HTTPStatus.BAD_REQUEST)
    scheduler.output_streamer.stream_output([req], False)


def start_deferred(runtime: Runtime) -> None:
    """Hands requests that waited for an aborted turn's end to the scheduler, once that turn is over."""
    waiting, runtime.deferred = runtime.deferred, []
    for request in waiting:
        spec = parse_turn(request.sampling_params.custom_params, len(request.input_ids))
        session = runtime.scheduler.session_controller.get(spec.session) if spec else None
        if session is not None and session._inflight:
            runtime.deferred.append(request)
        else:
            runtime.scheduler.handle_generate_request(request)


def drop_deferred(runtime: Runtime, abort: Any) -> None:
    """Answers waiting requests that an abort names (by request-id prefix, as SGLang does)."""
    for request in list(runtime.deferred):
        if abort.abort_all or (abort.rid and request.rid.startswith(abort.rid)):
            runtime.deferred.remove(request)
            refuse(runtime.scheduler, request, WireError("aborted", "the request was aborted while it waited"))


def forget_running(runtime: Runtime, turn: Turn, rid: str) -> None:
    """A turn is over without a last frame of its own."""
    record = runtime.sessions.get(turn.spec.session)
    if record is not None and record.running == rid:
        record.running = None


def plan_forward(runtime: Runtime, batch: Any, extends: bool) -> None:
    """Before a forward: binds new rows to session slots, and plans which prompt queries are captured."""
    runtime.plan = None
    runtime.force_window = False
    pieces = []
    offset = 0
    for index, req in enumerate(batch.reqs or ()):
        turn = turn_of(req)
        count = batch.extend_lens[index] if extends else 1
        if turn is not None:
            runtime.force_window |= turn.spec.force_window
            if extends:
                piece = _extend_piece(runtime, req, turn, batch.prefix_lens[index], count, offset)
                if piece is not None:
                    pieces.append(piece)
        offset += count
    if pieces:
        runtime.plan = plan_extend(runtime.slots, pieces)


def _extend_piece(runtime: Runtime, req: Any, turn: Turn, prefix: int, count: int, offset: int) -> ExtendPiece | None:
    state = _bind(runtime, req, turn, prefix) if turn.compresses else None
    if turn.prefill is None:
        turn.prefill = len(turn.prompt) - prefix
        if turn.state == "resumed":
            rings = runtime.slots.copy_rings(state.slot) if state else None
            turn.checkpoint = Checkpoint(prefix, rings)
    if state is None:
        return None
    labels = turn.labels(req.output_ids, runtime.automata)
    runtime.slots.automaton[state.slot] = turn.automaton
    policy = turn.policy
    return ExtendPiece(
        slot=state.slot,
        offset=offset,
        labels=labels[prefix : prefix + count],
        table=policy.ring_table(runtime.config.say_phase),
        capacity=policy.ring_capacity,
        last_ring=int(runtime.slots.last_ring[state.slot]),
    )


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
    state = record.kv
    assert state is not None and state.row == row
    if state.policy != turn.policy.name:
        state.policy = turn.policy.name
        slots.clear(state.slot)
    slots.table[state.slot] = slots.table.new_tensor(turn.policy.ring_table(runtime.config.say_phase))
    slots.capacity[state.slot] = turn.policy.ring_capacity
    return state


def after_step(runtime: Runtime, batch: Any) -> None:
    """After a batch result: compresses running turns that are due (a prefill chunk, or enough decode tokens)."""
    decodes = batch.forward_mode.is_decode()
    for req in batch.reqs:
        turn = turn_of(req)
        if turn is None or not turn.compresses or req.finished() or not req.kv.holds_kv or req.is_retracted:
            continue
        if not decodes and not turn.policy.compress_prefill:
            continue
        slack = runtime.config.compress_every if decodes else 1
        if _held(runtime, req.kv) >= turn.spec.budget + slack:
            _compress_running(runtime, req, turn)


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
        if turn.compresses and turn.policy.compress_prefill and _held(runtime, slot.kv) > turn.spec.budget:
            with OutsideFreeGroup(runtime.tree.token_to_kv_pool_allocator):
                try:
                    _compress(runtime, record, slot, slot.kv, turn)
                except NoRoomError:
                    reclaim.release(runtime, record.key, "evicted")
                    continue
        if runtime.config.dump_dir:
            dump.turn_end(runtime, record, int(slot.kv.kv_committed_len))
        turn.facts = facts.settle(runtime, record, turn, slot.kv, len(turn.prompt) + len(req.output_ids))


def _held(runtime: Runtime, kv: Any) -> int:
    return int(kv.kv_committed_len) - runtime.start_of(kv)


def _compress_running(runtime: Runtime, req: Any, turn: Turn) -> None:
    record = runtime.sessions.get(turn.spec.session)
    assert record is not None
    tree = runtime.tree
    if runtime.scheduler.chunked_req is req and not runtime.start_of(req.kv):
        # Between chunks nothing of the prompt is in the tree yet: publish it before the row becomes a mixture.
        tree.checkpoint(req, up_to=req.extend_end)
    holder = tree.session.borrowed_slot(req) or req
    try:
        _compress(runtime, record, holder, req.kv, turn)
    except NoRoomError as error:
        req.to_finish = FINISH_ABORT(f"agentkv:no_room: {error}", HTTPStatus.SERVICE_UNAVAILABLE)


def _compress(runtime: Runtime, record: SessionRecord, holder: Any, kv: Any, turn: Turn) -> None:
    if compress(runtime, record, holder, kv, turn.spec.budget):
        turn.compactions += 1
        turn.checkpoint = None


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
    turn.prefill, turn.checkpoint = None, None


class BusySessionError(Exception):
    """A later turn arrived while an earlier one runs: the earlier one is aborted, the later one waits for its end."""

    def __init__(self, running: str) -> None:
        super().__init__(running)
        self.running = running  # request id


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
