"""What a turn leaves behind: its entry in the session's ledger, and what logs, metrics and traces hear of it."""

from __future__ import annotations

import logging
from array import array
from typing import Any

from agentkv_serve.gateway.encoding import digest
from agentkv_serve.gateway.metrics import Metrics
from agentkv_serve.gateway.sessions.ledger import Turn, concatenate, extend_runs, reasoning_digest
from agentkv_serve.gateway.sessions.meaning import message_digest
from agentkv_serve.gateway.sessions.rendering import Renderer
from agentkv_serve.gateway.telemetry import TurnTrace
from agentkv_serve.gateway.turns.plan import Plan, unique_calls
from agentkv_serve.gateway.upstream.facts import Facts
from agentkv_serve.gateway.upstream.frames import Assembly

log = logging.getLogger(__name__)

_COMMITTED = ("stop", "tool_calls", "length")


def ledger_entry(renderer: Renderer, plan: Plan, facts: Facts, assembly: Assembly) -> Turn | None:
    """The ledger's record of a turn; None when it may not be recorded: aborted, or its tokens are not known."""
    output = facts.output_ids
    if assembly.finish not in _COMMITTED or not output or plan.prompt is None:
        return None
    message = assembly.message()
    labelled = renderer.label_output(plan.prompt, output)
    ids, runs = concatenate((), plan.prompt.ids, plan.prompt.runs)
    extend_runs(runs, labelled.runs, len(ids))
    ids.extend(output)
    return Turn(
        link=digest(plan.links[-1], message_digest(message)),
        parent=plan.match.link,
        ids=ids,
        runs=array("i", runs),
        open_block=labelled.open_block,
        reasoning=reasoning_digest(message),
        call_ids=tuple(unique_calls(message)),
    )


def count(metrics: Metrics, plan: Plan, facts: Facts, state: str, reason: str | None) -> None:
    """Count a committed turn."""
    metrics.of(metrics.turns, state, reason or "").inc()
    metrics.budgets.observe(facts.budget or abs(plan.budget) or float("inf"))
    metrics.held.observe(facts.held)
    metrics.of(metrics.tokens, "prompt").inc(plan.prompt_tokens)
    metrics.of(metrics.tokens, "prefilled").inc(facts.prefill)
    metrics.of(metrics.tokens, "generated").inc(len(facts.output_ids or ()))


def tell(
    plan: Plan,
    facts: Facts,
    trace: TurnTrace,
    *,
    outcome: str,
    state: str,
    reason: str | None,
    worker: str | None,
    request_id: str,
    seconds: float,
    error: str | None,
) -> None:
    """Log and trace the end of a turn; nothing of its content."""
    if not (trace.heard or log.isEnabledFor(logging.INFO)):
        return
    generated = len(facts.output_ids or ())
    told = {
        "tenant": plan.tenant.name,
        "session": plan.lease.session.key[:16] if plan.lease else None,
        "state": state,
        "reason": reason or plan.why_stateless or None,
        "worker": worker,
        "prompt_tokens": plan.prompt_tokens or None,
        "prefill_tokens": facts.prefill,
        "output_tokens": generated,
        "kv_tokens": facts.held,
    }
    if log.isEnabledFor(logging.INFO):
        more = {"request_id": request_id, "model": plan.request.model, "seconds": round(seconds, 4), "error": error}
        log.info("turn %s", outcome, extra={**told, **more})
    attributes: dict[str, Any] = {f"agentkv.{name}": value for name, value in told.items()}
    attributes |= {
        "gen_ai.usage.input_tokens": plan.prompt_tokens or None,
        "gen_ai.usage.output_tokens": generated,
        "gen_ai.response.finish_reasons": None if error else [outcome],
    }
    trace.end(attributes, error)
