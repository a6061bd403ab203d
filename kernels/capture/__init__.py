"""Keep the newest post-RoPE queries of every phase in a session's ring."""

from __future__ import annotations

import torch

from agentkv_serve.kernels.backend import Backend, check_index, resolve
from agentkv_serve.kernels.capture import reference

__all__ = ["write", "write_layers"]


def write(
    ring: torch.Tensor,
    layer: int,
    queries: torch.Tensor,
    slot: torch.Tensor,
    phase: torch.Tensor,
    position: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """`ring[slot[t], layer, phase[t], position[t]] = queries[t]` for every token t, in place.

    ring: `[slots, L, P, Q, Hq, D]`, mutated; queries: `[T, Hq, D]`, converted to the ring's dtype; slot,
    phase, position: int64 `[T]` on the ring's device. Slot 0 belongs to nobody: tokens that keep no query,
    and the padding rows of a CUDA graph, name it, and its content is undefined. Other (slot, phase, position)
    triples must differ from each other.

    Recordable in a CUDA graph: no value is read on the host. Raises `ValueError` for shapes that do not fit.
    """
    if ring.dim() != 6 or queries.dim() != 3 or queries.shape[1:] != ring.shape[4:]:
        raise ValueError(
            "queries must be [T, Hq, D] for a ring [slots, L, P, Q, Hq, D], "
            f"got {tuple(queries.shape)} and {tuple(ring.shape)}"
        )
    if not 0 <= layer < ring.shape[1]:
        raise ValueError(f"layer {layer} is outside the ring's {ring.shape[1]} layers")
    for name, index in (("slot", slot), ("phase", phase), ("position", position)):
        check_index(name, index)
        if index.numel() != queries.shape[0]:
            raise ValueError(f"{name} has {index.numel()} entries for {queries.shape[0]} queries")
    if not queries.shape[0]:
        return
    if resolve(backend, ring.device) == "triton":
        from agentkv_serve.kernels.capture import kernel

        kernel.write(ring, layer, queries, slot, phase, position)
    else:
        reference.write(ring, layer, queries, slot, phase, position)


def write_layers(
    ring: torch.Tensor,
    queries: list[torch.Tensor],
    slot: torch.Tensor,
    phase: torch.Tensor,
    position: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """`write` of all layers of a step, in place: `queries[l]`, `[T, Hq, D]`, are those of layer l.

    Shapes, conditions and errors are those of `write`. On a CPU it is one write, whose cost the number of layers
    hardly changes. Raises `ValueError` too where `queries` are not one per layer of the ring.
    """
    if len(queries) != ring.shape[1]:
        raise ValueError(f"queries of {len(queries)} layers for the ring's {ring.shape[1]}")
    if resolve(backend, ring.device) == "triton":
        for layer, rows in enumerate(queries):
            write(ring, layer, rows, slot, phase, position, backend=backend)
    else:
        reference.write_layers(ring, queries, slot, phase, position)
