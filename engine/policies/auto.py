"""The smallest budget that is predicted to lose little: the paper leaves budgets to be set by hand.

What would be lost is measured on the session's own buffered queries, which were real ones: every (query head, query)
pair whose strongest key holds more than `sharp` of its attention and would be evicted is a sharp miss. The share of
sharp misses follows the loss of output quality closely, the share of lost attention mass does not; both are offered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from agentkv_serve.engine.policies.attention import causal_attention
from agentkv_serve.engine.policies.base import Policy, Window
from agentkv_serve.phase_tagger import Phase


@dataclass(frozen=True, kw_only=True)
class AutoBudget:
    """How a budget is chosen at each compression."""

    epsilon: float = 0.02
    """Largest predicted loss; under the rule `price` what a further 1,000 entries have to save of it."""
    rule: Literal["under", "price"] = "under"
    """The smallest budget with a loss under epsilon, or the one with the least sum of loss and price. One price for
    all is what spends a common pool best: sessions differ in what one more entry saves."""
    loss: Literal["sharp_miss", "lost_mass", "output"] = "sharp_miss"
    asking: Literal["all", "generated"] = "all"
    """Queries that are measured: all, or those of think and act where there are some."""
    sharp: float = 0.1
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
        if self.rule == "price":
            spent = torch.arange(len(losses), device=losses.device) * (self.epsilon / 1000)
            least = int((losses + spent).argmin())
        else:
            above = (losses > self.epsilon).nonzero()
            least = int(above[-1]) + 1 if len(above) else 0
        return min(cap, max(floor, -(-least // self.step) * self.step))

    def losses(self, policy: Policy, window: Window) -> Tensor | None:
        """[N + 1] predicted loss at every budget from 0 to N entries; None without any buffered query."""
        if window.query_positions is None or not bool((window.query_positions >= 0).any()):
            return None
        parts = _halves(window) if self.crossed else [(window, window)]
        return torch.stack([self._losses(policy, *part) for part in parts]).mean(0)

    def _losses(self, policy: Policy, ranking: Window, measured: Window) -> Tensor:
        ranks = _ranks(policy, ranking)
        lost = torch.zeros(ranks.shape[-1] + 1, device=ranks.device)
        pairs = 0
        asking = measured.valid
        if self.asking == "generated":
            rings = policy.query_rings(measured)
            generated = asking & ((rings == Phase.THINK) | (rings == Phase.ACT))
            asking = generated if bool(generated.any()) else asking
        for layer, _, attention in causal_attention(measured, asking):
            heads, queries, group, _ = attention.shape
            pairs += heads * queries * group
            if self.loss == "output":
                lost += _output_errors(attention, measured, layer, ranks[layer], self.step)
                continue
            if self.loss == "sharp_miss":
                peak, key = attention.max(-1)
                rank = ranks[layer].gather(-1, key.flatten(1)).view_as(key)
                lost.index_add_(0, rank.flatten(), (peak > self.sharp).flatten().float())
            else:
                mass = attention.sum((1, 2))
                lost.index_add_(0, ranks[layer].flatten(), mass.flatten())
        if self.loss == "output":
            return lost / max(pairs, 1)
        # An entry of rank r is lost at every budget up to r.
        return lost.flip(0).cumsum(0).flip(0) / max(pairs, 1)


def _output_errors(attention: Tensor, window: Window, layer: int, ranks: Tensor, step: int) -> Tensor:
    """[N + 1] sum over query heads of |o - o_b| / |o|, o_b being the output with the b best entries alone.

    Known at multiples of `step`; between them the value of the next smaller one stands.
    """
    heads, queries, group, count = attention.shape
    order = ranks.argsort(-1)
    values = window.v_buffers[layer].index_select(0, window.slots).float().transpose(0, 1)  # [Hkv, N, Dv]
    values = values.gather(1, order[..., None].expand_as(values))
    weights = attention.flatten(1, 2).gather(-1, order[:, None].expand(-1, queries * group, -1))
    blocks = -(-count // step)
    padding = blocks * step - count
    values = torch.nn.functional.pad(values, (0, 0, 0, padding)).view(heads, blocks, step, -1)
    weights = torch.nn.functional.pad(weights, (0, padding)).view(heads, queries * group, blocks, step)
    sums = torch.einsum("hqbs,hbsd->hqbd", weights, values).cumsum(2)
    mass = weights.sum(-1).cumsum(2)
    full = sums[:, :, -1:]
    errors = (sums / mass.clamp(min=1e-9)[..., None] - full).norm(dim=-1) / full.norm(dim=-1).clamp(min=1e-9)
    errors = torch.cat([torch.ones_like(errors[..., :1]), errors], -1).sum((0, 1))  # nothing kept: all is lost
    return errors.repeat_interleave(step)[: count + 1]


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
