"""Torch definition of the query capture; the CPU path of the engine."""

from __future__ import annotations

import torch


def write(
    ring: torch.Tensor,
    layer: int,
    queries: torch.Tensor,
    slot: torch.Tensor,
    phase: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """See `agentkv_serve.kernels.capture.write`."""
    ring[:, layer].index_put_((slot, phase, position), queries.to(ring.dtype))


def write_layers(
    ring: torch.Tensor,
    queries: list[torch.Tensor],
    slot: torch.Tensor,
    phase: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """See `agentkv_serve.kernels.capture.write_layers`."""
    ring[slot, :, phase, position] = torch.stack(queries, dim=1).to(ring.dtype)
