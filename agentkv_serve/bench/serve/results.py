"""From runs to figures: throughput, latencies, what was computed again, and where a gain comes from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentkv_serve.bench.report import spread
from agentkv_serve.bench.serve.load import Run
from agentkv_serve.bench.serve.workload import Turn

CONTROL = 0.2  # below this share of really compressed requests a row is a control, not a measurement

# Two-sided 95% quantiles of Student's t by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Costs:
    """What one session alone costs on a server in one setting, in seconds.

    `prefill` a prompt token of the first turn, `token` a sampled token while the session holds `held` KV tokens per
    layer and KV head.
    """

    prefill: float
    token: float
    held: float

    @classmethod
    def of(cls, run: Run) -> Costs:
        """From a run of one session with nothing else on the server."""
        first = run.good[0]
        gaps = [gap for reply in run.good for gap in reply.gaps]
        held = [reply.facts.get("held", reply.prompt + len(reply.output) / 2) for reply in run.good]
        return cls(
            prefill=first.ttft / first.computed,
            token=statistics.median(gaps),
            held=statistics.mean(held),
        )


def row(runs: Sequence[Run], plan: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """The figures of one setting over its repeats."""
    setting = runs[0].setting
    turns = sum(len(session) for session in plan)
    good = [reply for run in runs for reply in run.good]
    figures: dict[str, Any] = {
        "setting": setting.name,
        "way": setting.way,
        "policy": setting.policy or None,
        "budget": setting.budget or None,
        "runs": len(runs),
        "output_tok_s": spread([run.tok_s for run in runs]),
        "turns_failed": [turns - len(run.good) for run in runs],
        "sessions_finished": [len(run.ended) for run in runs],
        "sessions_per_minute": spread([60 * len(run.ended) / run.wall for run in runs]),
        "wall_s": spread([run.wall for run in runs]),
        "turns_in_flight_mean": spread([_busy(run) / run.wall for run in runs]),
        "sessions_open_mean": spread([_open(run) / run.wall for run in runs]),
        "prefill_tokens": spread([sum(reply.computed for reply in run.good) for run in runs]),
        "recomputed_tokens": spread([recomputed(run) for run in runs]),
        "errors": sorted({reply.error for run in runs for reply in run.replies if reply.error}),
    }
    if good:
        gaps = [1000 * gap for reply in good for gap in reply.gaps]
        figures["ttft_s"] = percentiles([reply.ttft for reply in good])
        figures["ms_between_tokens"] = percentiles(gaps) if gaps else None
    pressures = [asdict(run.pressure) for run in runs if run.pressure is not None]
    figures["pool"] = {name: spread([pressure[name] for pressure in pressures]) for name in pressures[0]}
    if setting.way == "agentkv":
        share = sum(reply.compressed for reply in good) / len(good) if good else 0.0
        figures["compressed_share"] = share
        figures["role"] = "measurement" if share >= CONTROL else "control"
        figures["states"] = {
            state: sum(reply.facts.get("state") == state for reply in good) for state in ("new", "resumed", "rebuilt")
        }
    return figures


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))], "max": ordered[-1]}


def recomputed(run: Run) -> int:
    """Prompt tokens that were computed although the session had computed them before."""
    return sum(max(0, reply.computed - reply.needed) for reply in run.good)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Ours over theirs, repeat by repeat: median, and the 95% interval of the mean of logarithms (Student's t)."""
    logs = [math.log(mine / other) for mine, other in zip(ours, theirs, strict=True) if mine and other]
    if not logs:
        return {"median": None, "interval": None, "n": 0}
    interval = None
    if len(logs) > 1:
        half = _T95[min(len(logs) - 2, len(_T95) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
        middle = statistics.mean(logs)
        interval = [math.exp(middle - half), math.exp(middle + half)]
    return {"median": math.exp(statistics.median(logs)), "interval": interval, "n": len(logs)}


def fastest(rows: Sequence[Sequence[Run]]) -> Sequence[Run]:
    """The stock setting with the most output tokens a second (median over repeats)."""
    return max(rows, key=lambda runs: statistics.median(run.tok_s for run in runs))


def split(stock: Sequence[Run], ours: Sequence[Run], bare: Costs) -> dict[str, Any]:
    """Where the time between two settings goes, per run of the workload, and what could be gained at most.

    A run is prefill and decode by turns. Its decode takes as many steps as the turns in flight had tokens between
    them, at the median time between two; the rest of its wall time is prefill. Prefill avoided is what ours did not
    compute, at what a prompt token cost stock in this run; what ours saves beyond that, it saves on the tokens that
    both compute: they attend to fewer.

    Args:
        bare: what a session alone costs with the fewest KV tokens that were measured.

    Returns:
        seconds, and two limits to the ratio with the same kernels: of a cache that only spares stock what it computed
        again, and of one that, on top, makes every token as cheap as in `bare`.
    """
    stock_s, ours_s = (statistics.median(run.wall for run in runs) for runs in (stock, ours))
    decode, our_decode = (statistics.median(_decode_seconds(run) for run in runs) for runs in (stock, ours))
    prefill, our_prefill = stock_s - decode, ours_s - our_decode
    computed, our_computed = (statistics.median(_computed(run) for run in runs) for runs in (stock, ours))
    avoided = (computed - our_computed) * prefill / computed
    again = statistics.median(recomputed(run) for run in stock) * prefill / computed
    needed = statistics.median(sum(reply.needed for reply in run.good) for run in stock)
    floor = needed * bare.prefill + statistics.median(_decode_steps(run) for run in stock) * bare.token
    return {
        "stock_s": {"prefill": prefill, "decode": decode},
        "ours_s": {"prefill": our_prefill, "decode": our_decode},
        "saved_s": {
            "all": stock_s - ours_s,
            "prefill_avoided": avoided,
            "prefill_cheaper": prefill - our_prefill - avoided,
            "decode_faster": decode - our_decode,
        },
        "prefill_tokens_avoided": computed - our_computed,
        "limit_nothing_recomputed": stock_s / (stock_s - again),
        "limit_nor_any_context": stock_s / floor,
        "cost_with_next_to_no_context": asdict(bare),
    }


def _computed(run: Run) -> int:
    return sum(reply.computed for reply in run.good)


def _decode_steps(run: Run) -> float:
    """Steps of decode, each of which gives a token to every turn in flight."""
    return sum(len(reply.gaps) for reply in run.good) / max(1.0, _busy(run) / run.wall)


def _decode_seconds(run: Run) -> float:
    return _decode_steps(run) * statistics.median(gap for reply in run.good for gap in reply.gaps)


def _busy(run: Run) -> float:
    return sum(reply.ended - reply.sent for reply in run.replies)


def _open(run: Run) -> float:
    """Seconds from each session's first request to its last one's end."""
    spans: dict[int, tuple[float, float]] = {}
    for reply in run.replies:
        begun, _ = spans.get(reply.session, (reply.sent, 0.0))
        spans[reply.session] = (begun, reply.ended)
    return sum(ended - begun for begun, ended in spans.values())
