"""A budget that sets itself: the paper leaves budgets to be set by hand.

What a budget would lose is measured on the session's own buffered queries, which were real ones: every (query head,
query) pair whose strongest key holds more than `sharp` of its attention and would be evicted is a sharp miss. The share
of sharp misses follows the loss of output quality closely, the share of lost attention mass less so; both are offered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from agentkv_serve.engine.policies.attention import causal_attention
from agentkv_serve.engine.policies.base import Policy, Window
from agentkv_serve.phase_tagger import Label

_GENERATED = torch.tensor([Label.THINK, Label.ACT, Label.SAY], dtype=torch.int8)
_LEAST_ASKING = 8
"""Generated queries from which on they say something about those to come."""


@dataclass(frozen=True, kw_only=True)
class AutoBudget:
    """How a budget is chosen at each compression."""

    price: float = 0.0024
    """What 1,000 further entries have to save of the loss. One price for all sessions spends a common pool best: they
    differ in what one more entry saves, not only in what they lose."""
    epsilon: float | None = None
    """In place of a price: the smallest budget with a predicted loss of at most that."""
    inertia: float = 0.5
    """Share of the last budget in the next one, where that is smaller. What is evicted never comes back, and one
    compression's few queries may not ask for what the next ones will."""
    loss: Literal["sharp_miss", "lost_mass"] = "sharp_miss"
    asking: Literal["all", "generated"] = "generated"
    """Queries that are measured: all, or those of tokens that the model wrote itself (reasoning, calls, visible text);
    then nothing is decided before there are a few."""
    sharp: float = 0.3
    """Share of a query's attention from which its strongest key counts."""
    floor: int = 512
    """Smallest budget; the policy's own least one and the session's cap go before it."""
    step: int = 32
    """Budgets are multiples of it."""
    crossed: bool = True
    """Rank entries by one half of the queries and measure on the other, both ways; else rank and measure with all,
    which flatters the policy: its scores come from the very queries that it is measured on."""

    def choose(self, policy: Policy, window: Window, cap: int, pressure: float = 0.0) -> int:
        """The budget for a session at a compression point, at most `cap`; `cap` where nothing can be predicted.

        Args:
            window: as for the policy's own choice; its `keep` does not matter.
            pressure: 0 = room enough, 1 = the pool is full: the cap sinks from `cap` to the floor.
        """
        floor = min(cap, max(self.floor, policy.least_budget))
        cap = round(cap - min(max(pressure, 0.0), 1.0) * (cap - floor))
        losses = self.losses(policy, replace(window, keep=cap))
        if losses is None:
            return cap
        wanted = self._wanted(losses)
        before = window.budget or window.count
        if wanted < before:
            wanted = round(self.inertia * before + (1 - self.inertia) * wanted)
        return min(cap, max(floor, -(-wanted // self.step) * self.step))

    def _wanted(self, losses: Tensor) -> int:
        """The budget by these losses alone."""
        if self.epsilon is None:
            spent = torch.arange(len(losses), device=losses.device) * (self.price / 1000)
            return int((losses + spent).argmin())
        above = (losses > self.epsilon).nonzero()
        return int(above[-1]) + 1 if len(above) else 0

    def losses(self, policy: Policy, window: Window) -> Tensor | None:
        """[N + 1] predicted loss at every budget from 0 to N entries; None where too few queries are buffered."""
        least = 1 if self.asking == "all" else _LEAST_ASKING
        if window.query_positions is None or int(self._asking(window).sum()) < least:
            return None
        parts = _halves(window) if self.crossed else [(window, window)]
        return torch.stack([self._losses(policy, *part) for part in parts]).mean(0)

    def _asking(self, window: Window) -> Tensor:
        """[R] bool where `query_positions` are, on the host when serving: the queries that a loss is measured on."""
        assert window.query_positions is not None
        held = window.query_positions >= 0
        if self.asking == "all":
            return held
        assert window.labels is not None
        labels = window.labels[window.query_positions.clamp(min=0)]
        return held & torch.isin(labels, _GENERATED.to(labels.device))

    def _losses(self, policy: Policy, ranking: Window, measured: Window) -> Tensor:
        ranks = _ranks(policy, ranking)
        lost = torch.zeros(ranks.shape[-1] + 1, device=ranks.device)
        pairs = 0
        for layer, _, attention in causal_attention(measured, self._asking(measured).to(measured.device)):
            heads, queries, group, _ = attention.shape
            pairs += heads * queries * group
            if self.loss == "sharp_miss":
                peak, key = attention.max(-1)
                rank = ranks[layer].gather(-1, key.flatten(1)).view_as(key)
                lost.index_add_(0, rank.flatten(), (peak > self.sharp).flatten().float())
            else:
                mass = attention.sum((1, 2))
                lost.index_add_(0, ranks[layer].flatten(), mass.flatten())
        # An entry of rank r is lost at every budget up to r.
        return lost.flip(0).cumsum(0).flip(0) / max(pairs, 1)


def _ranks(policy: Policy, window: Window) -> Tensor:
    """[L, Hkv, N] int64 rank of every entry in the order in which a policy keeps them; what it protects goes first."""
    scores = policy.score(window).keep
    first = policy.protection(window).expand_as(scores)
    order = scores.masked_fill(first, torch.inf).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, places)


def _halves(window: Window) -> list[tuple[Window, Window]]:
    """(ranked by, measured on) for both halves of the held queries, every second one each."""
    assert window.query_positions is not None
    held = window.query_positions >= 0
    odd = held.long().cumsum(0) % 2 == 1
    first, second = (_only(window, held & chosen) for chosen in (odd, ~odd))
    return [(first, second), (second, first)] if bool((held & ~odd).any()) else [(window, window)]


def _only(window: Window, chosen: Tensor) -> Window:
    assert window.query_positions is not None
    where = torch.where(chosen, window.query_positions, -1)
    return replace(window, query_positions=where, valid=(where >= 0).to(window.device))
