"""Move the kept tokens of every layer and KV head to their new slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv_serve.kernels.backend import Backend, check_index, check_pool, check_values, resolve
from agentkv_serve.kernels.compact import reference

__all__ = ["gather_write"]


def gather_write(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    source: torch.Tensor,
    kept: torch.Tensor,
    target: torch.Tensor,
    *,
    shifted: bool = False,
    backend: Backend | None = None,
) -> None:
    """Copy row `source[kept[l, h, j]]` of layer l and KV head h to row `target[j]`, for K and V, all at once.

    k_buffers, v_buffers: one paged pool `[S, Hkv, D]` per layer, any dtype (bits are moved, nothing is
    converted), mutated at `target`; source: int64 `[N]` slots of the window; kept: int64 `[L, Hkv, B]`
    indices into `source`; target: int64 `[B]` slots, all different. Every read sees the pool as it was before
    the call, also where source and target overlap.

    shifted=True is the caller's word that `kept` ascends strictly along B and that `target[j]` is `source[N -
    B + j]` or no source slot at all: the window layout, where tokens only ever move towards the tail. The
    kernel then needs no scratch memory and half the traffic. It is checked on CPU tensors.

    Raises `ValueError` for shapes that do not fit each other, and for a wrong `shifted`.
    """
    hkv, _ = check_pool("k_buffers", k_buffers)
    check_values(v_buffers, k_buffers)
    check_index("source", source)
    check_index("target", target)
    check_index("kept", kept, dim=3)
    if kept.shape != (len(k_buffers), hkv, target.numel()):
        raise ValueError(
            f"kept must be [{len(k_buffers)}, {hkv}, {target.numel()}] (layers, KV heads, targets), "
            f"got {tuple(kept.shape)}"
        )
    if not target.numel():
        return
    if shifted and source.device.type == "cpu":
        _check_shifted(source, kept, target)
    if resolve(backend, source.device) == "triton":
        from agentkv_serve.kernels.compact import kernel

        kernel.gather_write(k_buffers, v_buffers, source, kept, target, shifted)
    else:
        reference.gather_write(k_buffers, v_buffers, source, kept, target)


def _check_shifted(source: torch.Tensor, kept: torch.Tensor, target: torch.Tensor) -> None:
    if target.numel() > source.numel() or bool((kept.diff(dim=-1) <= 0).any()):
        raise ValueError("shifted=True needs kept to ascend strictly along its last dimension")
    moved = target != source[source.numel() - target.numel() :]
    if bool(torch.isin(target[moved], source).any()):
        raise ValueError(
            "shifted=True needs every target to be the slot at the same place of the source's tail, or new"
        )
