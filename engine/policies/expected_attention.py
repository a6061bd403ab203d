"""Expected Attention (arXiv 2510.00636): the attention that future queries, taken to be Gaussian, will pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from agentkv_serve.engine.policies.base import LEAST_RECENT, Policy, Sampler, Scores, Window
from agentkv_serve.kernels import expected


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
    """(softmax(m·k/√d + k'Ck/2d), mean over the GQA group, + epsilon) x |v|, with m and C of the queries to come.

    Defaults of kvpress's ExpectedAttentionPress: statistics turned to the next 512 positions, covariance and value norm
    on, epsilon 0, 4 sinks. Mean and covariance are those of the 256 newest queries (the buffer of kvpress's
    DecodingPress).
    """

    name: ClassVar[str] = "expected_attention"
    needs_rope: ClassVar[bool] = True

    sinks: int = 4
    recent: int = LEAST_RECENT
    queries: int = 256
    n_future_positions: int = 512
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        return (Sampler(self.queries),)

    def score(self, window: Window) -> Scores:
        mean, covariance = self._statistics(window)
        # The kernel divides by √d; other softmax scales go into the statistics.
        factor = window.scale * window.queries.shape[-1] ** 0.5
        return Scores(
            expected.expected_attention(
                mean * factor,
                covariance * factor**2 if self.use_covariance else None,
                window.k_buffers,
                window.slots,
                v_buffers=window.v_buffers if self.use_vnorm else None,
                epsilon=self.epsilon,
                backend=window.backend,
            )
        )

    def _statistics(self, window: Window) -> tuple[Tensor, Tensor]:
        """Mean [L, Hq, D] and covariance [L, Hq, D, D] of the queries to come, in the model's own pair order."""
        rope = window.rope
        if rope is None or window.query_positions is None:
            raise ValueError("expected_attention needs the model's RoPE: give the window a Rope")
        held = window.valid.nonzero()[:, 0]
        queries = rope.unrotate(window.queries[:, held].transpose(1, 2), window.query_positions.to(window.device)[held])
        mean = queries.mean(2)
        centred = queries - mean[:, :, None]
        covariance = centred.transpose(2, 3) @ centred / max(1, len(held))
        mean, covariance = expected.rotated_statistics(
            mean, covariance, rope.frequencies, window.length, self.n_future_positions
        )
        order = rope.order(mean.shape[-1])
        size = rope.attention_scaling
        return mean[..., order] * size, covariance[..., order, :][..., order] * size**2
