"""Which of an operation's two implementations runs, and the argument checks that all operations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

Backend = Literal["torch", "triton"]


def resolve(backend: Backend | None, device: torch.device) -> Backend:
    """The implementation to run: the one asked for, or by device (`None`): Triton on a GPU, torch on a CPU.

    Raises `ValueError` for an unknown name. Triton on CPU tensors works only in Triton's interpreter
    (`TRITON_INTERPRET=1` before the first import of a kernel), which is for tests: it is thousands of times
    slower.
    """
    if backend is None:
        return "torch" if device.type == "cpu" else "triton"
    if backend not in get_args(Backend):
        raise ValueError(f"unknown kernel backend {backend!r}: use one of {', '.join(get_args(Backend))}")
    return backend


def check_pool(name: str, buffers: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Check one paged pool `[S, Hkv, D]` per layer and return `(Hkv, D)`.

    Raises `ValueError` unless every layer has the same shape, strides, dtype and device, and contiguous rows:
    the kernels reach all layers through one table of base addresses and one set of strides.
    """
    if not buffers:
        raise ValueError(f"{name} is empty: give one [S, Hkv, D] buffer per attention layer")
    first = buffers[0]
    if first.dim() != 3 or (first.shape[2] > 1 and first.stride(2) != 1):
        raise ValueError(
            f"{name} must hold [S, Hkv, D] buffers with contiguous rows, "
            f"got shape {tuple(first.shape)}, strides {first.stride()}"
        )
    for layer, buffer in enumerate(buffers):
        if (buffer.shape, buffer.stride(), buffer.dtype, buffer.device) != (
            first.shape,
            first.stride(),
            first.dtype,
            first.device,
        ):
            raise ValueError(
                f"{name}[{layer}] is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}, "
                f"{name}[0] is {tuple(first.shape)} {first.dtype} on {first.device}: all layers must be alike"
            )
    return first.shape[1], first.shape[2]


def check_values(v_buffers: Sequence[torch.Tensor], k_buffers: Sequence[torch.Tensor]) -> None:
    """Raise `ValueError` unless `v_buffers` are pools of as many layers and KV heads as the checked `k_buffers`."""
    heads, hkv = check_pool("v_buffers", v_buffers)[0], k_buffers[0].shape[1]
    if len(v_buffers) != len(k_buffers) or heads != hkv:
        raise ValueError(f"v_buffers: {len(v_buffers)} layers of {heads} heads, k_buffers: {len(k_buffers)} of {hkv}")


def check_index(name: str, index: torch.Tensor, dim: int = 1) -> None:
    """Raise `ValueError` unless `index` is an int64 tensor of `dim` dimensions."""
    if index.dtype != torch.int64 or index.dim() != dim:
        raise ValueError(f"{name} must be int64 with {dim} dimension(s), got {index.dtype} {tuple(index.shape)}")


def base_addresses(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Base addresses int64 `[L]` of the layers' buffers, on their device: one launch can then serve all
    layers."""
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64).to(
        buffers[0].device, non_blocking=True
    )


def aligned(buffers: Sequence[torch.Tensor], size: int) -> bool:
    """Whether every row of every head starts at a multiple of `size` bytes, in all layers."""
    first = buffers[0]
    steps = [stride * first.element_size() for stride in first.stride()[:-1]]
    return all(number % size == 0 for number in [*steps, *(buffer.data_ptr() for buffer in buffers)])
