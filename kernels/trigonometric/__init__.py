"""TriAttention's score: the attention that a key will get from the average query at many future distances.

Per layer and query head, calibration gives the complex mean qm_f of the un-rotated queries' rotary pairs f
and the mean absolute value qa_f. For a key with un-rotated pairs kc_f at position p, with the current
position t and future offsets o,

    s(o) = sum_f |qm_f| |kc_f| cos(w_f (t - p + o) + arg(qm_f conj(kc_f))) + sum_f (qa_f - |qm_f|) |kc_f|

averaged (or maximised) over o in {1, 2, 4, ..., 65536} (arXiv 2604.04921). A cached key is kr_f = kc_f exp(i
w_f p), hence the first sum is the real part of sum_f qm_f exp(i w_f (t + o)) conj(kr_f): neither the
positions nor the un-rotated keys are needed, and the mean over the offsets is one inner product with the mean
of the rotated queries. A constant factor as YaRN's attention scaling changes no ranking and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv_serve.kernels.backend import Backend, check_index, check_pool, resolve
from agentkv_serve.kernels.trigonometric import reference

__all__ = ["OFFSETS", "trigonometric"]

OFFSETS = tuple(1 << power for power in range(17))


def trigonometric(
    mean: torch.Tensor,
    magnitude: torch.Tensor,
    k_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    frequencies: torch.Tensor,
    position: int,
    *,
    offsets: Sequence[int] = OFFSETS,
    maximum: bool = False,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Scores fp32 `[L, Hq, N]` of every query head; higher = keep. Mutates nothing.

    mean: complex64 `[L, Hq, F]` and magnitude: fp32 `[L, Hq, F]`, the calibrated statistics; k_buffers: one
    paged pool `[S, Hkv, D]` per layer with rotated keys whose pair f is (f, f + F), 2 F <= D (the rest of a
    partially rotated head is left out); slots: int64 `[N]`; frequencies: `[F]`, radians per token; position:
    of the next token. maximum=True takes the best offset instead of the mean.

    The published selection z-normalises each row, then takes the maximum (or mean) over a KV head's group.
    Raises `ValueError` for shapes that do not fit.
    """
    hkv, dim = check_pool("k_buffers", k_buffers)
    check_index("slots", slots)
    pairs = frequencies.numel()
    if not mean.is_complex() or mean.dim() != 3 or mean.shape[0] != len(k_buffers) or mean.shape[2] != pairs:
        raise ValueError(f"mean must be complex [{len(k_buffers)}, Hq, {pairs}], got {mean.dtype} {tuple(mean.shape)}")
    if mean.shape[1] % hkv or 2 * pairs > dim:
        raise ValueError(f"{mean.shape[1]} query heads and {pairs} pairs do not fit {hkv} KV heads of size {dim}")
    if magnitude.shape != mean.shape:
        raise ValueError(f"magnitude must be {tuple(mean.shape)}, got {tuple(magnitude.shape)}")
    if not offsets:
        raise ValueError("offsets must not be empty")
    if not slots.numel():
        return torch.empty(*mean.shape[:2], 0, device=slots.device)
    # Angles in float64: w t reaches a million radians.
    ahead = position + torch.tensor(offsets, dtype=torch.float64, device=mean.device)
    angles = ahead[:, None] * frequencies.to(torch.float64)
    queries = mean.to(torch.complex128)[:, :, None] * torch.polar(torch.ones_like(angles), angles)
    if not maximum:
        queries = queries.mean(2, keepdim=True)
    queries = torch.cat([queries.real, queries.imag], -1).float()  # [L, Hq, O, 2F]
    weights = (magnitude - mean.abs()).float()
    if resolve(backend, slots.device) == "triton":
        from agentkv_serve.kernels.trigonometric import kernel

        return kernel.best_product(queries, weights, k_buffers, slots)
    return reference.best_product(queries, weights, k_buffers, slots)
