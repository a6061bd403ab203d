"""AgentKV with one part changed, for the ablations. Not served: the engine knows only the registered policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentkv_serve.engine.policies import Policy, Sampler, Scores, Window
from agentkv_serve.engine.policies.agentkv import AgentKV
from agentkv_serve.engine.policies.base import NO_RING
from agentkv_serve.kernels import redundancy
from agentkv_serve.phase_tagger import Label, Phase


@dataclass(frozen=True, kw_only=True)
class Regrouped(AgentKV):
    """Phases without one of them (`dropped`), or with two counted as one (`merged` into the other)."""

    name: ClassVar[str] = "agentkv_regrouped"

    dropped: Phase | None = None
    merged: tuple[Phase, Phase] | None = None

    def ring_table(self, say_phase: str = "others") -> tuple[int, ...]:
        table = list(super().ring_table(say_phase))
        if self.dropped is not None:
            table = [NO_RING if ring == self.dropped else ring for ring in table]
        if self.merged is not None:
            source, target = self.merged
            table = [int(target) if ring == source else ring for ring in table]
        return tuple(table)


@dataclass(frozen=True, kw_only=True)
class Strided(AgentKV):
    """Every 8th query of a phase instead of the newest ones; one place is the newest token's."""

    name: ClassVar[str] = "agentkv_strided"

    stride: int = 8

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(1, self.queries_per_phase - 1, self.stride),) * len(Phase)


@dataclass(frozen=True, kw_only=True)
class Farthest(AgentKV):
    """Of the newest `pool_size` queries of a phase, those that are farthest from each other (greedy, per KV head)."""

    name: ClassVar[str] = "agentkv_farthest"

    pool_size: int = 64

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(self.pool_size),) * len(Phase)

    def score(self, window: Window) -> Scores:
        rings = self.query_rings(window)
        parts = []
        for ring in range(len(Phase)):
            held = torch.nonzero((rings == ring) & window.valid)[:, 0]
            if held.numel():
                parts.append(farthest_points(window.queries[:, held], self.queries_per_phase, len(window.k_buffers)))
        queries = torch.cat(parts, 1) if parts else window.queries
        valid = torch.ones(queries.shape[1], dtype=torch.bool, device=window.device) if parts else window.valid
        return super().score(replace(window, queries=queries, valid=valid))


@dataclass(frozen=True, kw_only=True)
class Redundant(AgentKV):
    """With R-KV's redundancy term, the switch that the paper used for Nemotron."""

    name: ClassVar[str] = "agentkv_redundancy"

    mix_lambda: float = 0.1

    def score(self, window: Window) -> Scores:
        mass = super().score(window).keep
        repeats = redundancy.redundancy(window.k_buffers, window.slots, backend=window.backend)
        return Scores(self.mix_lambda * mass - (1 - self.mix_lambda) * repeats)


def farthest_points(queries: Tensor, count: int, layers: int) -> Tensor:
    """`count` of the queries `[L, U, Hq, D]` per layer, greedily far from each other; the first is the newest.

    Distances are those of all heads together. Fewer queries than `count` are all returned.
    """
    held = queries.shape[1]
    if held <= count:
        return queries
    flat = queries.float().flatten(2)
    chosen = torch.full((layers, 1), held - 1, dtype=torch.int64, device=queries.device)
    nearest = torch.full((layers, held), torch.inf, device=queries.device)
    for _ in range(count - 1):
        newest = flat.gather(1, chosen[:, -1:, None].expand(-1, -1, flat.shape[2]))
        nearest = torch.minimum(nearest, (flat - newest).norm(dim=-1))
        chosen = torch.cat((chosen, nearest.argmax(1, keepdim=True)), 1)
    return queries.gather(1, chosen[:, :, None, None].expand(-1, -1, *queries.shape[2:]))


def variants() -> dict[str, tuple[str, Policy, float]]:
    """Every ablation by name: (group, policy, share of tokens whose label is replaced at random)."""
    found: dict[str, tuple[str, Policy, float]] = {"agentkv": ("base", AgentKV(), 0.0)}
    for total in (8, 16, 24, 48, 64):
        found[f"q = {total}"] = ("queries", AgentKV(queries_per_phase=total // len(Phase)), 0.0)
    for phase in Phase:
        found[f"without {phase.name.lower()}"] = ("phases", Regrouped(dropped=phase), 0.0)
    for noise in (0.1, 0.3):
        found[f"{noise:.0%} wrong labels"] = ("labels", AgentKV(), noise)
    found["think and act merged"] = ("labels", Regrouped(merged=(Phase.THINK, Phase.ACT)), 0.0)
    found["strided sampler"] = ("samplers", Strided(), 0.0)
    found["farthest-point sampler"] = ("samplers", Farthest(), 0.0)
    found["with redundancy"] = ("redundancy", Redundant(), 0.0)
    return found


PAPER = {
    "agentkv": "39.0 / 42.1",
    "q = 8": "33.5 / 32.5",
    "q = 16": "38.0 / 34.2",
    "q = 24": "36.5 / 36.8",
    "q = 48": "40.0 / 38.6",
    "q = 64": "36.5 / 33.3",
    "without others": "35.5 (of 40.0)",
    "without think": "38.5 (of 40.0)",
    "without act": "37.5 (of 40.0)",
    "without tool": "38.0 (of 40.0)",
    "10% wrong labels": "37.5 (of 40.0)",
    "30% wrong labels": "33.5 (of 40.0)",
    "think and act merged": "37.0 (of 40.0)",
    "farthest-point sampler": "coverage .616 (last: .600)",
    "with redundancy": "46.5 / 50.5, Nemotron-49B only",
}
"""Task scores that the paper prints, Qwen3-32B: BFCL multi_turn at 3072 / tau2 retail at 4096 for the number of
queries; one setting for phases and labels; utility coverage at 1536 for samplers."""


def noisy(labels: npt.NDArray[np.int8], share: float) -> npt.NDArray[np.int8]:
    """int8 `[n]` labels of which a share, drawn at random, is replaced by another label."""
    if not share:
        return labels
    generator = np.random.default_rng(0)
    wrong = generator.random(len(labels)) < share
    shift = generator.integers(1, len(Label), len(labels))
    return np.where(wrong, (labels + shift) % len(Label), labels).astype(np.int8)
