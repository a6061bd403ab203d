"""Every hook into SGLang, in one table. Each does nothing in processes and servers without our runtime.

Private API of the pinned SGLang version: `selfcheck` verifies at start that each target exists and was wrapped.
"""

from __future__ import annotations

import logging
from typing import Any

from agentkv_serve.engine import lifecycle
from agentkv_serve.engine import runtime as runtime_module
from agentkv_serve.engine.turn import turn_of
from agentkv_serve.engine.wire import WireError

logger = logging.getLogger(__name__)

RECOMPUTED_TAIL = 32
"""Prompt tokens that are always computed, also on a radix hit: without queries there is nothing to score with."""


def around_handle_generate_request(original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Finds the session of a request and makes it that session's turn, or refuses it."""
    runtime = runtime_module.current()
    if runtime is None or request.session_params is not None:
        return original(scheduler, request, *args, **kwargs)
    try:
        turn = lifecycle.begin_turn(runtime, request)
    except WireError as error:
        lifecycle.refuse(scheduler, request, error)
        return None
    runtime.arriving = turn
    try:
        return original(scheduler, request, *args, **kwargs)
    finally:
        runtime.arriving = None


def after_create_req(req: Any, session: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Hangs the turn on SGLang's request, if the request is what was asked for."""
    runtime = runtime_module.current()
    if runtime is not None and runtime.arriving is not None:
        lifecycle.attach(runtime.arriving, req)


def around_strip_bos_token(original: Any, request: Any, tokenizer: Any) -> None:
    """Our turns carry exact ids: a leading BOS of the new tokens belongs there (ChatML models use it as a marker)."""
    runtime = runtime_module.current()
    if runtime is None or runtime.arriving is None:
        original(request, tokenizer)


def after_release_aborted_request(_: None, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """A turn that leaves the waiting queue is over: stock SGLang would leave its session in flight for ever."""
    if turn_of(req) is not None and req.session is not None:
        req.session.abort_req()


def after_max_prefix_len(length: int, req: Any, input_len: int) -> int | None:
    """Recomputes the prompt's tail on a radix hit of a session that will be compressed."""
    runtime = runtime_module.current()
    turn = turn_of(req)
    if runtime is None or turn is None or not turn.compresses:
        return None
    if runtime.tree.session.will_lend_record(req):
        return None
    return min(length, max(0, input_len - RECOMPUTED_TAIL))


def after_init_new(_: Any, cls: Any, batch: Any, model_runner: Any, **kwargs: Any) -> None:
    """The last place where requests and the device batch meet: plan the query capture."""
    runtime = runtime_module.current()
    if runtime is not None and runtime.scheduler is not None:
        lifecycle.plan_forward(runtime, batch, batch.forward_mode.is_extend())


def after_process_batch_result(_: Any, scheduler: Any, batch: Any, result: Any) -> None:
    """Compresses running turns that are due."""
    runtime = runtime_module.current()
    if runtime is not None:
        lifecycle.after_step(runtime, batch)


def before_stream_output(streamer: Any, reqs: Any, *args: Any, **kwargs: Any) -> None:
    """Compresses finished turns before their last frames go out, so that the frames tell the truth."""
    runtime = runtime_module.current()
    if runtime is not None and runtime.scheduler is not None:
        lifecycle.finish_turns(runtime, reqs)


def after_cached_tokens_details(details: Any, streamer: Any, req: Any) -> Any:
    """Puts a finished turn's facts into the one free text field that reaches the client's last frame."""
    turn = turn_of(req)
    if turn is None or turn.facts is None:
        return None
    return {"device": 0, "host": 0, **(details or {}), "storage": 0, "storage_backend": turn.facts.encode()}


def around_kv_private_tokens(original: Any, kv: Any, page_size: int) -> Any:
    """Slots that a row holds outside the tree: the hole holds none."""
    runtime = runtime_module.current()
    hole = 0 if runtime is None else max(0, runtime.start_of(kv) - kv.cache_protected_len)
    return original(kv, page_size) - hole


def before_row_free(pool: Any, holder: Any) -> None:
    """A row goes back: its compressed state is gone."""
    runtime = runtime_module.current()
    if runtime is not None and holder.kv.holds_kv:
        runtime.drop_row(holder.kv.req_pool_idx)


def after_close(_: Any, controller: Any, session_id: str) -> None:
    """Notes that a session is closed: its next turn starts clean."""
    runtime = runtime_module.current()
    if runtime is not None and session_id not in controller.sessions:
        runtime.sessions.close(session_id)


def after_scheduler_init(_: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """The scheduler is complete: the runtime may serve."""
    runtime = runtime_module.current()
    if runtime is not None:
        runtime.scheduler = scheduler


HOOKS: tuple[tuple[str, str, Any], ...] = (
    ("sglang.srt.managers.scheduler.Scheduler.__init__", "after", after_scheduler_init),
    (
        "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
        "around",
        around_handle_generate_request,
    ),
    (
        "sglang.srt.managers.scheduler.Scheduler._release_aborted_request",
        "after",
        after_release_aborted_request,
    ),
    ("sglang.srt.managers.scheduler.Scheduler.process_batch_result", "after", after_process_batch_result),
    ("sglang.srt.session.session_controller.Session.create_req", "after", after_create_req),
    ("sglang.srt.session.session_controller.Session._strip_bos_token", "around", around_strip_bos_token),
    ("sglang.srt.session.session_controller.SessionController._close", "after", after_close),
    ("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", "after", after_max_prefix_len),
    ("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", "after", after_init_new),
    (
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        "before",
        before_stream_output,
    ),
    (
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
        "after",
        after_cached_tokens_details,
    ),
    (
        "sglang.srt.managers.scheduler_components.pool_stats_observer.kv_private_tokens",
        "around",
        around_kv_private_tokens,
    ),
    ("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free", "before", before_row_free),
)
"""(target, kind, hook): kinds are those of SGLang's `HookRegistry`."""
