"""From a request to a turn of a session."""

from __future__ import annotations

import dataclasses
from array import array
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams

from agentkv_serve.engine import admission, reclaim
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.turn import ATTRIBUTE, Turn
from agentkv_serve.engine.wire import TurnSpec, WireError, parse_turn


class BusySessionError(Exception):
    """A later turn arrived while an earlier one runs: the earlier one is aborted, the later one waits for its end."""

    def __init__(self, running: str) -> None:
        super().__init__(running)
        self.running = running  # request id


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
    if request.input_embeds is not None:
        raise WireError("bad_request", "input_embeds cannot be a session's turn: a session is known by its token ids")
    if (request.sampling_params.beam_width or 1) > 1:
        raise WireError("bad_request", "a session follows one answer: send beam_width > 1 without the agentkv field")
    spec = dataclasses.replace(spec, policy=spec.policy or runtime.config.policy)
    policy = runtime.policies.get(spec.policy)
    if policy is None:
        raise WireError(
            "bad_request",
            f"this worker does not serve the policy {spec.policy!r}, only {', '.join(runtime.policies)}; start it with "
            f"--agentkv-policies",
        )
    try:
        initial = runtime.automata.initial(spec.family, spec.initial)
    except KeyError as error:
        raise WireError("bad_request", str(error.args[0])) from None
    if policy.compresses and spec.budget:
        least = policy.least_budget
        if spec.budget < least:
            raise WireError("budget", f"budget {spec.budget} is below {least}, the least that {policy.name} can keep")
    if spec.force_ids:
        _check_forced(runtime, spec)
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
        if turn.reason is not None:
            runtime.metrics.rebuilt(turn.reason)
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


def _check_forced(runtime: Runtime, spec: TurnSpec) -> None:
    if not runtime.config.allow_forced:
        raise WireError("bad_request", "force_ids is for evaluation: start the worker with --agentkv-allow-forced")
    vocabulary = int(runtime.scheduler.model_config.vocab_size)
    if max(spec.force_ids) >= vocabulary:
        raise WireError("bad_request", f"force_ids must be below {vocabulary}, the model's vocabulary")


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
