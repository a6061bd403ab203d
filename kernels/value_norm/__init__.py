"""Euclidean norm of the cached values: how much a token changes the output where it is attended.

    norm[l, h, i] = |v_{l,h,i}|

What value-aware scores weigh attention with (CriticalKV, arXiv 2502.03805; Expected Attention, arXiv 2510.00636).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv_serve.kernels.backend import Backend, check_index, check_pool, resolve
from agentkv_serve.kernels.value_norm import reference

__all__ = ["value_norms"]


def value_norms(
    v_buffers: Sequence[torch.Tensor], slots: torch.Tensor, *, backend: Backend | None = None
) -> torch.Tensor:
    """Norms fp32 `[L, Hkv, N]`. Mutates nothing.

    v_buffers: one paged pool `[S, Hkv, Dv]` per layer; slots: int64 `[N]`. Raises `ValueError` for other shapes.
    """
    hkv, _ = check_pool("v_buffers", v_buffers)
    check_index("slots", slots)
    if not slots.numel():
        return torch.empty(len(v_buffers), hkv, 0, device=slots.device)
    if resolve(backend, slots.device) == "triton":
        from agentkv_serve.kernels.value_norm import kernel

        return kernel.value_norms(v_buffers, slots)
    return reference.value_norms(v_buffers, slots)
