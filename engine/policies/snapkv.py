"""SnapKV (arXiv 2404.14469): the attention of the newest queries, smoothed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import avg_pool1d, pad

from agentkv_serve.engine.policies.attention import mean_weights, received_attention
from agentkv_serve.engine.policies.base import Policy, Sampler, Scores, Window


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Mean causal attention of the window's queries, averaged over 5 neighbours and over the GQA group.

    Defaults of kvpress's SnapKVPress: window 64 (always kept; `recent` here), average pool of 5, no sinks.
    """

    name: ClassVar[str] = "snapkv"

    sinks: int = 0
    recent: int = 64
    pool: int = 5

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(self.recent),)

    def score(self, window: Window) -> Scores:
        attention = received_attention(window, mean_weights(window.valid))[..., : window.count - self.recent]
        smooth = avg_pool1d(attention, self.pool, stride=1, padding=self.pool // 2)
        return Scores(pad(smooth, (0, self.recent)))
