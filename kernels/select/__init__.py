"""Which tokens of every row stay: the best `keep` of them, the protected ones first."""

from __future__ import annotations

import torch

from agentkv_serve.kernels.backend import Backend, resolve
from agentkv_serve.kernels.select import reference

__all__ = ["top_keep"]


def top_keep(
    scores: torch.Tensor,
    keep: int,
    protected: torch.Tensor,
    *,
    validate: bool | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Positions int64 `[..., keep]` of the kept tokens, ascending along the last dimension. Mutates nothing.

    scores: fp32 `[..., N]`, higher = keep; protected: bool `[N]` or of the scores' shape, kept whatever their
    score. Equal scores: the lowest position wins, so the result is the same on every device and every rank.
    NaN counts as the lowest score, +inf as the highest finite one.

    Raises `ValueError` when `keep` is outside `[0, N]`, and when a row protects more than `keep` tokens. That
    last check needs the mask's content on the host: by default (`validate=None`) it is made on CPU tensors
    only; unchecked, such a row keeps its first `keep` protected tokens.
    """
    if scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32, got {scores.dtype}")
    count = scores.shape[-1]
    if not 0 <= keep <= count:
        raise ValueError(f"cannot keep {keep} of {count} tokens")
    if protected.dtype != torch.bool or protected.shape not in ((count,), scores.shape):
        raise ValueError(
            f"protected must be bool [{count}] or {tuple(scores.shape)}, got {protected.dtype} {tuple(protected.shape)}"
        )
    if validate is None:
        validate = protected.device.type == "cpu"
    if validate and count:
        most = int(protected.sum(-1).max())
        if most > keep:
            raise ValueError(f"{most} protected tokens do not fit {keep} kept ones: raise the budget or protect fewer")
    if keep == 0 or not scores.numel():
        return torch.empty(*scores.shape[:-1], keep, dtype=torch.int64, device=scores.device)
    if resolve(backend, scores.device) == "triton":
        from agentkv_serve.kernels.select import kernel

        return kernel.top_keep(scores, keep, protected)
    return reference.top_keep(scores, keep, protected)
