"""Published scores, printed beside ours for reference. Percent of tasks solved; other models, other machines.

Source: the AgentKV paper (OpenReview s80e8otSxP), its tables for Qwen3-8B and Qwen3-32B.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """One published row; `budget` None = full KV."""

    benchmark: str
    group: str
    model: str
    policy: str
    budget: int | None
    score: float


_BUDGETS = {
    "web_search": (512, 768, 1024),
    "multi_turn": (2048, 3072, 4096),
    "memory": (1024, 1536, 2048),
    "airline": (512, 768, 1024),
    "retail": (2048, 4096, 6114),
    "telecom": (2048, 4096, 6114),
}

# (model, policy) -> per group the score with full KV, or those at the three budgets
_BFCL: dict[tuple[str, str], tuple[tuple[float, ...], ...]] = {
    ("Qwen3-32B", "full"): ((28.0,), (52.0,), (24.8,)),
    ("Qwen3-32B", "agentkv"): ((15.0, 22.0, 22.0), (22.0, 42.0, 48.0), (23.2, 21.7, 22.8)),
    ("Qwen3-32B", "rkv"): ((5.0, 14.0, 25.0), (13.0, 27.0, 37.0), (23.2, 21.3, 23.9)),
    ("Qwen3-32B", "triattention"): ((5.0, 21.0, 21.0), (22.0, 41.5, 44.0), (24.3, 21.5, 26.9)),
    ("Qwen3-8B", "full"): ((11.0,), (34.5,), (14.4,)),
    ("Qwen3-8B", "agentkv"): ((12.0, 14.0, 16.0), (17.0, 26.5, 38.0), (18.7, 19.1, 18.7)),
    ("Qwen3-8B", "rkv"): ((6.0, 6.0, 19.0), (5.0, 14.0, 20.0), (17.2, 16.8, 15.9)),
    ("Qwen3-8B", "triattention"): ((3.0, 7.0, 12.0), (7.5, 18.0, 23.0), (12.3, 15.7, 14.0)),
}
_TAU2: dict[tuple[str, str], tuple[tuple[float, ...], ...]] = {
    ("Qwen3-32B", "full"): ((44.0,), (53.5,), (25.4,)),
    ("Qwen3-32B", "agentkv"): ((40.0, 40.0, 40.0), (8.8, 42.1, 50.9), (6.1, 18.4, 21.9)),
    ("Qwen3-32B", "rkv"): ((28.0, 28.0, 26.0), (6.1, 26.3, 44.7), (5.3, 7.9, 22.8)),
    ("Qwen3-32B", "triattention"): ((44.0, 40.0, 40.0), (7.9, 16.7, 39.5), (7.9, 10.5, 20.2)),
    ("Qwen3-8B", "full"): ((40.0,), (42.1,), (15.8,)),
    ("Qwen3-8B", "agentkv"): ((44.0, 36.0, 34.0), (10.5, 27.2, 30.7), (7.9, 14.0, 18.4)),
    ("Qwen3-8B", "rkv"): ((40.0, 40.0, 32.0), (5.3, 13.2, 28.9), (10.5, 18.4, 18.4)),
    ("Qwen3-8B", "triattention"): ((26.0, 28.0, 18.0), (5.3, 11.4, 21.9), (14.6, 14.9, 12.3)),
}
_TABLES = {
    "bfcl": (("web_search", "multi_turn", "memory"), _BFCL),
    "tau2": (("airline", "retail", "telecom"), _TAU2),
}


def references(benchmark: str, groups: set[str]) -> list[Reference]:
    """The published rows of a benchmark (`bfcl`, `tau2`) in the given groups (`multi_turn`, `airline`, …)."""
    names, table = _TABLES[benchmark]
    return [
        Reference(benchmark, group, model, policy, budget, score)
        for (model, policy), scores in table.items()
        for group, values in zip(names, scores, strict=True)
        if group in groups
        for budget, score in zip((None,) if policy == "full" else _BUDGETS[group], values, strict=True)
    ]
