"""A second, quite different check for one-layer models: no cache at all, one dense forward under a mask.

In a model with a single attention layer the keys and values of a token do not depend on any other token. What a
compressed session computes is therefore what the whole text computes when every query is only allowed to see the keys
that its session still held.
"""

import torch

from .model import forward
from .replay import Compaction


class Masked:
    """The model's attention step over the whole text at once."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask  # [Hkv, n, n] bool: query row may see key column

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        group = query.shape[0] // key.shape[0]
        logits = query @ key.repeat_interleave(group, 0).transpose(1, 2) * scale
        weights = logits.masked_fill(~self.mask.repeat_interleave(group, 0), -torch.inf).softmax(-1)
        return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1)


def visible(length: int, heads: int, compactions: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """[Hkv, n, n]: causal, without the keys that earlier compactions dropped.

    `compactions`: (length at the time, kept positions [Hkv, K]), in order.
    """
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(heads, -1, -1).clone()
    for at, kept in compactions:
        gone = torch.ones(heads, at, dtype=torch.bool).scatter(1, kept, False)
        mask[:, at:, :at] &= ~gone[:, None]
    return mask


def last_logits(
    model: torch.nn.Module, ids: list[int], heads: int, compactions: list[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """Logits [V] after `ids` of a one-layer model whose session was compacted as given."""
    return forward(model, ids, 0, Masked(visible(len(ids), heads, compactions)))


def of(compactions: list[Compaction]) -> list[tuple[int, torch.Tensor]]:
    """The replay's compactions in the form that `visible` takes."""
    return [(one.length, one.kept[0]) for one in compactions]
