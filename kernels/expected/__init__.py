"""Expected Attention: the attention that a key will get if future queries are Gaussian.

With the mean m and covariance C of the (future, rotated) queries of a head, the expected logit's exponential
is exp(m . k / sqrt(D) + k^T C k / (2 D)), so

    mass[g, i] = softmax over i of (m_g . k_i / sqrt(D) + k_i^T C_g k_i / (2 D))
    score[h, i] = (mean over g in group h of mass[g, i] + epsilon) * |v_{h,i}|

(arXiv 2510.00636). `rotated_statistics` turns statistics of un-rotated queries into those of the tokens to
come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv_serve.kernels.backend import Backend, check_index, check_pool, check_values, resolve
from agentkv_serve.kernels.expected import reference
from agentkv_serve.kernels.expected.reference import rotated_statistics
from agentkv_serve.kernels.value_norm import value_norms

__all__ = ["expected_attention", "rotated_statistics"]


def expected_attention(
    mean: torch.Tensor,
    covariance: torch.Tensor | None,
    k_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    *,
    v_buffers: Sequence[torch.Tensor] | None = None,
    epsilon: float = 0.0,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Scores fp32 `[L, Hkv, N]`; higher = keep. Mutates nothing.

    mean: `[L, Hq, D]`; covariance: `[L, Hq, D, D]` or None (only the mean counts); k_buffers, v_buffers: one
    paged pool `[S, Hkv, D]` per layer; slots: int64 `[N]`; epsilon: added before the value norm (0 in the
    paper's code). Raises `ValueError` for shapes that do not fit.
    """
    hkv, dim = check_pool("k_buffers", k_buffers)
    check_index("slots", slots)
    if mean.dim() != 3 or mean.shape[0] != len(k_buffers) or mean.shape[1] % hkv or mean.shape[2] != dim:
        raise ValueError(
            f"mean must be [{len(k_buffers)}, Hq, {dim}] with Hq a multiple of {hkv}, got {tuple(mean.shape)}"
        )
    if covariance is not None and covariance.shape != (*mean.shape, dim):
        raise ValueError(f"covariance must be {(*mean.shape, dim)}, got {tuple(covariance.shape)}")
    if v_buffers is not None:
        check_values(v_buffers, k_buffers)
    if not slots.numel():
        return torch.empty(len(k_buffers), hkv, 0, device=slots.device)
    if resolve(backend, slots.device) == "triton":
        from agentkv_serve.kernels.expected import kernel

        logits = kernel.expected_logits(mean, covariance, k_buffers, slots)
    else:
        logits = reference.expected_logits(mean, covariance, k_buffers, slots)
    scores = logits.softmax(-1).view(len(k_buffers), hkv, -1, slots.numel()).mean(2) + epsilon
    if v_buffers is not None:
        scores *= value_norms(v_buffers, slots, backend=backend)
    return scores
