"""R-KV's redundancy of every cached key: how much it repeats others of its KV head.

With kn = k / (|k| + 1e-8) and C = kn kn^T, the diagonal set to 0, and in every row i the entry of the LAST
column whose similarity is above the threshold set to 0 too (column 0 where there is none): the newest of
several alike keys is not held redundant on account of the others. Then

    redundancy = softmax over j of (mean over i of C[i, j])

(arXiv 2505.24133, redundancy estimation; the rule for the last column is that of the published code's
default). Without the softmax's input ever being an N x N matrix in memory: the column sums of C are (sum of
kn) . kn_j, less the diagonal, less the few entries that the rule removes, so that only the search for the
last similar column looks at pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv_serve.kernels.backend import Backend, check_index, check_pool, resolve
from agentkv_serve.kernels.redundancy import reference

__all__ = ["redundancy"]


def redundancy(
    k_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    *,
    threshold: float = 0.5,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Redundancy fp32 `[L, Hkv, N]` of the window's keys; higher = more redundant, each row sums to 1.
    Mutates nothing.

    k_buffers: one paged pool `[S, Hkv, D]` per layer; slots: int64 `[N]`, the window's slots in token order;
    threshold: cosine similarity above which two keys count as alike, in `[0, 1)`.

    R-KV's score of a token older than its query window is 0.07 * attention mass - 0.93 * redundancy
    (`mix_lambda`). Raises `ValueError` for a threshold out of range and shapes that do not fit.
    """
    hkv, _ = check_pool("k_buffers", k_buffers)
    check_index("slots", slots)
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be in [0, 1), got {threshold}")
    if not slots.numel():
        return torch.empty(len(k_buffers), hkv, 0, device=slots.device)
    if resolve(backend, slots.device) == "triton":
        from agentkv_serve.kernels.redundancy import kernel

        mean = kernel.mean_similarity(k_buffers, slots, threshold)
    else:
        mean = reference.mean_similarity(k_buffers, slots, threshold)
    return mean.softmax(-1)
