"""R-KV (arXiv 2505.24133): recent attention, less what other keys repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import pad

from agentkv_serve.engine.policies.base import Policy, Sampler, Scores, Window
from agentkv_serve.kernels import redundancy, score


@dataclass(frozen=True, kw_only=True)
class RKV(Policy):
    """lambda x attention mass under the newest queries - (1 - lambda) x redundancy of the key, of all older entries.

    Defaults of the published class: 8 newest queries (`window_size`, which are also the recent window; `recent` here),
    max-pool 7, lambda 0.07, similarity threshold 0.5, the last of several alike keys counts as not redundant. Attention
    is over the older keys only; similarity over all. No sinks, no protected prompt.
    """

    name: ClassVar[str] = "rkv"

    sinks: int = 0
    recent: int = 8
    pool: int = 7
    mix_lambda: float = 0.07
    threshold: float = 0.5

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(self.recent),)

    def score(self, window: Window) -> Scores:
        older = window.count - self.recent
        mass = score.attention_mass_layers(
            window.queries,
            window.valid,
            window.k_buffers,
            window.slots[:older],
            scale=window.scale,
            pool=self.pool,
            backend=window.backend,
        )
        repeats = redundancy.redundancy(
            window.k_buffers, window.slots, threshold=self.threshold, backend=window.backend
        )[..., :older]
        mixed = self.mix_lambda * mass - (1 - self.mix_lambda) * repeats
        return Scores(pad(mixed, (0, self.recent)))  # the recent window is kept whatever its score
