"""From a request to a turn of a session, and from a batch result to compressions. Called by the hooks."""

from __future__ import annotations

import logging
from array import array
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import CloseSessionReqInput, OpenSessionReqInput, SessionParams

from agentkv_serve.engine import facts
from agentkv_serve.engine.capture import ExtendPiece, plan_extend
from agentkv_serve.engine.compaction import NoRoomError, compress
from agentkv_serve.engine.policies import get_policy
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.sessions import KvState, SessionRecord, outcome
from agentkv_serve.engine.turn import ATTRIBUTE, Turn, turn_of
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
    controller = runtime.scheduler.session_controller
    session = controller.get(spec.session)
    if session is not None and session._inflight:
        raise WireError("session_busy", "the session's last turn is still running: wait for its end, or abort it")
    record = runtime.sessions.admit(spec)
    resumed = session is not None and _resume(runtime, record, session, spec, request, prompt)
    if session is not None and not resumed:
        controller.close(CloseSessionReqInput(session_id=spec.session))
    if not resumed:
        controller.open(
            OpenSessionReqInput(
                capacity_of_str_len=1 << 30,
                session_id=spec.session,
                streaming=True,
                timeout=runtime.config.idle_seconds,
            )
        )
    request.session_params = SessionParams(id=spec.session)
    state, reason = outcome(record, resumed=resumed)
    return Turn(spec=spec, policy=policy, prompt=prompt, initial=initial, state=state, reason=reason)


def _resume(runtime: Runtime, record: SessionRecord, session: Any, spec: TurnSpec, request: Any, prompt: Any) -> bool:
    """Whether the session's state continues in this request; if so, cuts the request to its new tokens."""
    history = session_tokens(session)
    slot = runtime.tree.session.slots.get(spec.session)
    if not history or slot is None or not slot.kv.holds_kv:
        return False
    if spec.rebuild:
        record.lost = "requested"
        return False
    if len(prompt) <= len(history) or prompt[: len(history)] != history:
        record.lost = "diverged"
        return False
    request.input_ids = prompt[len(history) :]
    return True


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
    if turn.prefill is None:
        turn.prefill = len(turn.prompt) - prefix
    if not turn.compresses:
        return None
    state = _bind(runtime, req, turn)
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


def _bind(runtime: Runtime, req: Any, turn: Turn) -> KvState:
    """The session's KV state on the request's row; takes a session slot at the first turn that compresses."""
    record = runtime.sessions.get(turn.spec.session)
    if record is None:
        raise RuntimeError(f"session {turn.spec.session[:8]} vanished while its turn was waiting")
    row = req.kv.req_pool_idx
    slots = runtime.slots
    if record.kv is None:
        slot = slots.take()
        if slot is None:
            raise RuntimeError("no session slot is free: start the engine with a larger --agentkv-max-sessions")
        runtime.sessions.bind(record, KvState(row=row, slot=slot, policy=turn.policy.name))
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
        if record is None or facts.aborted(req):
            if record is not None:
                record.lost = record.lost or "aborted"
            continue
        if slot is None or not slot.kv.holds_kv:
            continue
        record.labels = turn.labels(req.output_ids, runtime.automata)
        if turn.compresses and turn.policy.compress_prefill and _held(runtime, slot.kv) > turn.spec.budget:
            with OutsideFreeGroup(runtime.tree.token_to_kv_pool_allocator):
                _try_compress(runtime, record, slot, slot.kv, turn)
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
    _try_compress(runtime, record, holder, req.kv, turn)


def _try_compress(runtime: Runtime, record: SessionRecord, holder: Any, kv: Any, turn: Turn) -> None:
    try:
        turn.compactions += compress(runtime, record, holder, kv, turn.spec.budget)
    except NoRoomError as error:
        logger.warning("session %s stays uncompressed for now: %s", record.key[:8], error)


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
