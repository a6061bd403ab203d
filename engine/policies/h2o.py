"""H2O (arXiv 2306.14048): heavy hitters by cumulative attention, and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentkv_serve.engine.policies.attention import received_attention
from agentkv_serve.engine.policies.base import LEAST_RECENT, Policy, Sampler, Scores, Window


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Half of the budget to the newest tokens, half to those with the largest sum of attention ever received.

    The sum is noted of every entry from compaction to compaction. It is exact in decode, where at most
    `compress_every` = 128 queries come between two compactions; of a longer prompt chunk the newest 128 count, since
    earlier queries are not kept.
    """

    name: ClassVar[str] = "h2o"

    sinks: int = 0
    recent: int = LEAST_RECENT
    recent_share: float = 0.5
    queries: int = 128

    @property
    def carry_dtype(self) -> torch.dtype | None:
        return torch.float32

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(self.queries),)

    def score(self, window: Window) -> Scores:
        assert window.query_positions is not None
        fresh = (
            window.query_positions.to(window.device) >= window.since
        )  # older ones were counted by the compaction before
        total = received_attention(window, (fresh & window.valid).to(torch.float32))
        if window.carry is not None:
            total += window.carry
        return Scores(total, total)

    def protection(self, window: Window) -> Tensor:
        return self._edges(window, self.sinks, max(self.recent, int(window.keep * self.recent_share)))
