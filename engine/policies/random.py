"""Random eviction with a protected prompt (Random Attention, arXiv 2609.03430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentkv_serve.engine.policies.base import Policy, Sampler, Scores, Window


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keeps the opening prompt and the last 64 tokens, and draws the rest uniformly, per layer and KV head.

    Defaults of the package `randkv`. Each entry is drawn anew at every compaction. The method keeps the whole prompt on
    top of its budget; here the budget is firm, so of a longer prompt only the first tokens are sure to stay, as many as
    fit `prompt_share` of the budget less the recent window.
    """

    name: ClassVar[str] = "random"

    sinks: int = 0
    recent: int = 64
    prompt_share: float = 0.5
    salt: int = 0
    """Another value draws other tokens of the same session."""

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return ()

    def score(self, window: Window) -> Scores:
        generator = torch.Generator().manual_seed((window.seed + 1_000_003 * self.salt) % (1 << 63))
        return Scores(torch.rand(window.positions.shape, generator=generator).to(window.device))

    def protection(self, window: Window) -> Tensor:
        return self._opening(window, self.prompt_share)
