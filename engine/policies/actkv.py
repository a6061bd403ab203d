"""ActKV (arXiv 2609.31395): attention of the action tokens alone, remembered over rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentkv_serve.engine.policies.attention import mean_weights, received_attention
from agentkv_serve.engine.policies.base import NO_RING, Policy, Sampler, Scores, Window
from agentkv_serve.phase_tagger import Label


@dataclass(frozen=True, kw_only=True)
class ActKV(Policy):
    """Least recently/frequently used, where a use is a hit by a round's action tokens.

    A round's hits of a head are its most attended entries that together hold `top_p` of the attention of the round's
    action tokens. Every entry notes c <- 2^-lambda c + attention of the hit; the largest c stay. Published: lambda 0.5,
    top-p 0.9; the system prompt and the task are never evicted.

    Where the engine's carrier differs from the paper: it compresses whenever the budget is exceeded, not only at round
    ends (without new action tokens nothing is noted); the budget is fixed and holds the prompt too (of a longer
    prompt only `prompt_share` of the budget less the recent window is sure to stay). Entries without any hit are ranked
    by the attention of the newest action tokens, before the first action by that of the newest tokens.
    """

    name: ClassVar[str] = "actkv"

    sinks: int = 0
    recent: int = 32
    prompt_share: float = 0.5
    decay: float = 0.5
    top_p: float = 0.9
    action_queries: int = 32
    other_queries: int = 8

    @property
    def carry_dtype(self) -> torch.dtype | None:
        return torch.float32

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(self.other_queries), Sampler(self.action_queries))

    def ring_table(self, say_phase: str = "others") -> tuple[int, ...]:
        rings = {Label.ACT: 1, Label.GLUE: NO_RING}
        return tuple(rings.get(label, 0) for label in Label)

    def score(self, window: Window) -> Scores:
        assert window.query_positions is not None
        rings = self.query_rings(window)
        actions = (rings == 1) & window.valid
        fresh = actions & (window.query_positions.to(window.device) >= window.since)
        attention = received_attention(window, mean_weights(fresh))
        noted = torch.zeros_like(attention) if window.carry is None else window.carry
        noted = torch.where(fresh.any(), 2.0**-self.decay * noted + _hits(attention, self.top_p), noted)
        rest = received_attention(window, mean_weights(torch.where(actions.any(), actions, window.valid)))
        # Noted hits first: attention of the rest only orders what no round has hit.
        return Scores(noted + 1e-6 * rest, noted)

    def protection(self, window: Window) -> Tensor:
        return self._opening(window, self.prompt_share)


def _hits(attention: Tensor, share: float) -> Tensor:
    """`attention` [..., N] of the smallest set of entries that holds `share` of its sum, 0 elsewhere."""
    ordered, places = attention.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    hit = before < share * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(attention).scatter(-1, places, ordered * hit)
