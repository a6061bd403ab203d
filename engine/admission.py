"""The scheduler's arithmetic, corrected by what a compressed session can really hold.

Stock SGLang reserves a request's whole logical length. A compressed session never holds more than its budget, one
prefill chunk (or the tokens between two compressions) and a page; so more sessions fit, and one may outgrow the pool.
"""

from __future__ import annotations

from typing import Any

from agentkv_serve.engine import reclaim
from agentkv_serve.engine.policies import Policy
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.turn import Turn, turn_of
from agentkv_serve.engine.wire import WireError


def peak_growth(runtime: Runtime, turn: Turn, held: int, chunk: int | None, logical: int) -> int:
    """KV slots that a turn may need on top of those it holds, at its worst moment.

    Args:
        held: KV slots that the session holds now.
        chunk: longest prefill chunk, None = the whole prompt at once.
        logical: what stock SGLang would reserve: the new tokens and those still to be sampled.
    """
    if not turn.compresses:
        return logical
    step = logical if chunk is None else min(logical, chunk * _chunks_in_flight(runtime))
    step = min(logical, step + prefill_slack(runtime, turn.policy))
    slack = max(step, runtime.config.compress_every) + 2 * int(runtime.tree.page_size)
    return min(logical, max(0, turn.spec.budget - held) + slack)


def prefill_slack(runtime: Runtime, policy: Policy) -> int:
    """Tokens over its budget that a session may hold at the end of a prefill chunk, less one.

    At most an eighth of the pool; half of it under a policy that does not compress prompts. Longer prompts are
    compressed all the same: their turn would wait for ever for room, and those behind it too.
    """
    pool = int(runtime.scheduler.max_total_num_tokens)
    return min(policy.prefill_slack, pool // 8) if policy.compress_prefill else pool // 2


def _chunks_in_flight(runtime: Runtime) -> int:
    """Under overlap scheduling a second prefill chunk is launched before the first one's result is compressed."""
    return 2 if runtime.scheduler.enable_overlap else 1


def held_tokens(runtime: Runtime, req: Any) -> int:
    """KV slots that a request holds now, the session's that it resumes included."""
    slot = runtime.tree.session.slots.get(req.session.session_id) if req.session is not None else None
    kv = req.kv if req.kv.holds_kv or slot is None else slot.kv
    return int(kv.kv_committed_len) - runtime.start_of(kv) if kv.holds_kv else 0


def can_start(runtime: Runtime, turn: Turn, admitted: list[Any]) -> bool:
    """Whether a session slot can be had for a turn that will be compressed.

    Args:
        admitted: requests that were admitted in the same pass; they take their slots only when they run.
    """
    if not _needs_session_slot(runtime, turn):
        return True
    promised = sum(_needs_session_slot(runtime, other) for req in admitted if (other := turn_of(req)) is not None)
    return promised < reclaim.session_slots(runtime)


def _needs_session_slot(runtime: Runtime, turn: Turn) -> bool:
    record = runtime.sessions.get(turn.spec.session)
    return turn.compresses and (record is None or record.kv is None)


def needs_row(runtime: Runtime, req: Any) -> bool:
    """Whether a waiting request has yet to get a req_to_token row: its session, if any, has none to lend."""
    return not (req.kv.holds_kv or runtime.tree.session.will_lend_record(req))


def has_row(runtime: Runtime, req: Any, admitted: list[Any]) -> bool:
    """Whether a request has a row, or can have a free one.

    Args:
        admitted: requests that were admitted in the same pass; they take their rows only when they run.
    """
    if not needs_row(runtime, req):
        return True
    promised = sum(needs_row(runtime, other) for other in admitted)
    return promised < int(runtime.scheduler.req_to_token_pool.available_size())


def refuse_oversized(runtime: Runtime, turn: Turn | None, prompt_len: int, limit: int) -> None:
    """Refuses at once what can never fit.

    Args:
        limit: longest prompt that fits without compression.

    Raises:
        WireError: with the numbers.
    """
    pool = int(runtime.scheduler.max_total_num_tokens)
    if turn is None or not turn.compresses:
        if prompt_len >= limit:
            raise WireError(
                "bad_request",
                f"the prompt has {prompt_len} tokens; without compression at most {limit - 1} fit in this worker "
                f"(KV pool of {pool} tokens). Set a budget, or shorten the prompt",
            )
        return
    chunk = (runtime.scheduler.chunked_prefill_size or prompt_len) * _chunks_in_flight(runtime)
    chunk += prefill_slack(runtime, turn.policy)
    need = min(prompt_len, turn.spec.budget + min(chunk, prompt_len) + 2 * int(runtime.tree.page_size))
    if need > pool:
        raise WireError(
            "bad_request",
            f"budget {turn.spec.budget} and {min(chunk, prompt_len)} tokens of prefill in flight need {need} KV slots; "
            f"this worker's pool has {pool}. Lower the budget or --chunked-prefill-size",
        )
