"""Every hook into SGLang, in one table. Each does nothing in processes and servers without our runtime.

Private API of the pinned SGLang version: `selfcheck` verifies at start that each target exists and was wrapped.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from agentkv_serve.engine import admission, forced, forward, intake, keys, kv_map, progress, reclaim
from agentkv_serve.engine import runtime as runtime_module
from agentkv_serve.engine.turn import turn_of
from agentkv_serve.engine.wire import WireError

RECOMPUTED_TAIL = 32
"""Prompt tokens that are always computed, also on a radix hit: without queries there is nothing to score with."""


def around_handle_generate_request(original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Finds the session of a request and makes it that session's turn, or refuses it."""
    runtime = runtime_module.current()
    if runtime is None or request.session_params is not None:
        return original(scheduler, request, *args, **kwargs)
    try:
        turn = intake.begin_turn(runtime, request)
        if turn is None:
            admission.refuse_oversized(runtime, None, len(request.input_ids), runtime.uncompressed_limit)
    except intake.BusySessionError as busy:
        runtime.deferred.append(request)
        scheduler.abort_request(AbortReq(rid=busy.running))
        intake.start_deferred(runtime)
        return None
    except WireError as error:
        intake.refuse(scheduler, request, error)
        return None
    runtime.arriving = turn
    try:
        return original(scheduler, request, *args, **kwargs)
    finally:
        runtime.arriving = None


def after_abort_request(_: None, scheduler: Any, abort: Any) -> None:
    """A request that waits for another turn's end can be aborted too."""
    runtime = runtime_module.current()
    if runtime is not None:
        intake.drop_deferred(runtime, abort)


def after_create_req(req: Any, session: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Hangs the turn on SGLang's request, if the request is what was asked for."""
    runtime = runtime_module.current()
    if runtime is not None and runtime.arriving is not None:
        intake.attach(runtime.arriving, req)


def around_strip_bos_token(original: Any, request: Any, tokenizer: Any) -> None:
    """Our turns carry exact ids: a leading BOS of the new tokens belongs there (ChatML models use it as a marker)."""
    runtime = runtime_module.current()
    if runtime is None or runtime.arriving is None:
        original(request, tokenizer)


def after_release_aborted_request(_: None, scheduler: Any, req: Any) -> None:
    """A turn that leaves the waiting queue is over."""
    runtime = runtime_module.current()
    turn = turn_of(req)
    if runtime is not None and turn is not None:
        intake.forget_running(runtime, turn, req.rid)


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
        forward.plan_forward(runtime, batch, batch.forward_mode.is_extend())


def after_process_batch_result(_: Any, scheduler: Any, batch: Any, result: Any) -> None:
    """Compresses running turns that are due."""
    runtime = runtime_module.current()
    if runtime is not None:
        progress.after_step(runtime, batch)
        intake.start_deferred(runtime)


def before_stream_output(streamer: Any, reqs: Any, *args: Any, **kwargs: Any) -> None:
    """Compresses finished turns before their last frames go out, so that the frames tell the truth."""
    runtime = runtime_module.current()
    if runtime is not None and runtime.scheduler is not None:
        progress.finish_turns(runtime, reqs)
        runtime.metrics.refresh(runtime)


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


def after_is_timed_out(timed_out: bool, session: Any) -> bool | None:
    """A session is not idle while a turn of it waits or runs, however long that takes."""
    return False if timed_out and session._inflight and runtime_module.current() is not None else None


def around_close(original: Any, controller: Any, session_id: str) -> None:
    """Notes why a session is gone: closed (its next turn starts clean), or idle for too long (it is rebuilt)."""
    timed_out = controller.sessions[session_id].is_timed_out()
    original(controller, session_id)
    runtime = runtime_module.current()
    if runtime is not None and session_id not in controller.sessions:
        runtime.sessions.close(session_id, "idle" if timed_out else None)
        runtime.sessions.sweep()
        runtime.metrics.closed(runtime)


def after_evict_to_free_tokens(_: Any, allocator: Any, tree_cache: Any, num_tokens: int) -> None:
    """Where cached prefixes did not suffice, idle sessions give way."""
    runtime = runtime_module.current()
    if runtime is None or runtime.scheduler is None or allocator.free_group is not None:
        return
    short = num_tokens - allocator.available_size()
    if short > 0:
        reclaim.free_tokens(runtime, num_tokens)
        short = num_tokens - allocator.available_size()
        if short > 0:  # prefixes that the released sessions had locked
            tree_cache.evict_for_alloc(EvictParams(num_tokens=short))


def after_available_and_evictable(size: int, budget: Any) -> int | None:
    """Admission counts idle sessions as free: they give way."""
    runtime = runtime_module.current()
    if runtime is None or runtime.scheduler is None:
        return None
    return size + reclaim.reclaimable_tokens(runtime)


def around_get_num_allocatable_reqs(
    original: Any, scheduler: Any, *args: Any, num_held_rows: int = 0, **kwargs: Any
) -> int:
    """Turns that wait for nothing but their own session's row count as allocatable: SGLang sees a full row pool, and
    would wait for ever for rows that these very turns hold. An idle session gives its row to whoever needs one."""
    runtime = runtime_module.current()
    if runtime is not None and scheduler.waiting_queue:
        with_row = sum(not admission.needs_row(runtime, req) for req in scheduler.waiting_queue)
        if with_row < len(scheduler.waiting_queue):
            reclaim.free_row(runtime)
        num_held_rows = max(num_held_rows, with_row)
    return int(original(scheduler, *args, num_held_rows=num_held_rows, **kwargs))


def around_add_one_req(original: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A turn that needs a session slot waits until one can be had. What idle sessions have locked gives way."""
    runtime = runtime_module.current()
    turn = turn_of(req)
    if runtime is None:
        return original(adder, req, *args, **kwargs)
    if not admission.has_row(runtime, req, adder.can_run_list):
        return AddReqResult.CONTINUE  # passed over: those behind it may have a row of their own
    if turn is not None and not admission.can_start(runtime, turn, adder.can_run_list):
        return AddReqResult.NO_TOKEN
    verdict = original(adder, req, *args, **kwargs)
    while verdict is AddReqResult.NO_TOKEN and reclaim.free_locked_prefix(runtime):
        verdict = original(adder, req, *args, **kwargs)
    return verdict


def around_check_prefill_budget(original: Any, adder: Any, req: Any, *, total_tokens: int, **kwargs: Any) -> Any:
    """Reserves what a compressed session can hold, not its logical length."""
    runtime = runtime_module.current()
    turn = turn_of(req)
    if runtime is not None and turn is not None:
        held = admission.held_tokens(runtime, req)
        total_tokens = admission.peak_growth(runtime, turn, held, kwargs["chunk_limit"], total_tokens)
    return original(adder, req, total_tokens=total_tokens, **kwargs)


def around_max_new_tokens_for_memory(
    original: Any, allocator: Any, input_tokens: int, max_new_tokens: int, **kwargs: Any
) -> Any:
    """A compressed session may grow past the pool: only the model's context length bounds its output."""
    runtime = runtime_module.current()
    if runtime is not None and runtime.arriving is not None and runtime.arriving.compresses:
        return max_new_tokens
    return original(allocator, input_tokens, max_new_tokens, **kwargs)


def after_running_token_offset(offset: float, adder: Any, req: Any) -> float | None:
    """A running compressed turn never needs more than it can grow to."""
    runtime = runtime_module.current()
    turn = turn_of(req)
    if runtime is None or turn is None or not turn.compresses:
        return None
    held = admission.held_tokens(runtime, req)
    return min(offset, admission.peak_growth(runtime, turn, held, 0, int(offset) + 1))


def after_scheduler_init(_: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """The scheduler is complete: the runtime may serve. Compressed sessions may outgrow the pool."""
    runtime = runtime_module.current()
    if runtime is not None:
        runtime.scheduler = scheduler
        runtime.uncompressed_limit = scheduler.max_req_input_len
        spare = scheduler.max_req_len - scheduler.max_req_input_len
        scheduler.max_req_len = scheduler.model_config.context_len - 1
        scheduler.max_req_input_len = scheduler.max_req_len - spare


def before_from_cli_args(cls: Any, arguments: Any) -> None:
    """The worker's key comes by environment."""
    keys.take(arguments)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_HTTP = "sglang.srt.observability.http_request_metrics"
_SESSION = "sglang.srt.session.session_controller.Session"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_POOL_STATS = "sglang.srt.managers.scheduler_components.pool_stats_observer"
_ALLOCATOR = "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"

HOOKS: tuple[tuple[str, str, Any], ...] = (
    ("sglang.srt.server_args.ServerArgs.from_cli_args", "before", before_from_cli_args),
    (f"{_SCHEDULER}.__init__", "after", after_scheduler_init),
    (f"{_SCHEDULER}.handle_generate_request", "around", around_handle_generate_request),
    (f"{_SCHEDULER}.abort_request", "after", after_abort_request),
    (f"{_SCHEDULER}._release_aborted_request", "after", after_release_aborted_request),
    (f"{_SCHEDULER}.process_batch_result", "after", after_process_batch_result),
    (f"{_SCHEDULER}.get_internal_state", "around", kv_map.around_get_internal_state),
    (f"{_SCHEDULER}.get_num_allocatable_reqs", "around", around_get_num_allocatable_reqs),
    (f"{_HTTP}.add_http_request_metrics_middleware", "after", kv_map.after_app_is_made),
    (f"{_SESSION}.create_req", "after", after_create_req),
    (f"{_SESSION}.is_timed_out", "after", after_is_timed_out),
    (f"{_SESSION}._strip_bos_token", "around", around_strip_bos_token),
    (f"{_SESSION}Controller._close", "around", around_close),
    ("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", "after", after_max_prefix_len),
    ("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", "after", after_init_new),
    (f"{_STREAMER}.stream_output", "before", before_stream_output),
    (f"{_STREAMER}.get_cached_tokens_details", "after", after_cached_tokens_details),
    ("sglang.srt.layers.sampler.Sampler.forward", "around", forced.around_sampler_forward),
    (f"{_POOL_STATS}.kv_private_tokens", "around", around_kv_private_tokens),
    ("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free", "before", before_row_free),
    (f"{_ALLOCATOR}.evict_to_free_tokens", "after", after_evict_to_free_tokens),
    (f"{_ALLOCATOR}.max_new_tokens_for_memory", "around", around_max_new_tokens_for_memory),
    (
        "sglang.srt.mem_cache.prefill_budget.PrefillBudget._available_and_evictable",
        "after",
        after_available_and_evictable,
    ),
    (f"{_ADDER}.add_one_req", "around", around_add_one_req),
    (f"{_ADDER}._check_prefill_budget", "around", around_check_prefill_budget),
    (f"{_ADDER}._get_running_request_total_token_offset", "after", after_running_token_offset),
)
"""(target, kind, hook): kinds are those of SGLang's `HookRegistry`."""
