"""A compressed session computed a second time: a Hugging Face model, plain float32 torch, formulas written for reading.

Nothing here imports the engine or the kernels. The attention step is taken over through transformers' public registry,
which hands out queries, keys and values after RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "agentkv_check"
PHASES, NEWEST, SINKS, RECENT, POOL = 4, 8, 32, 32, 7


def load_model(folder: Path, device: torch.device) -> Any:
    """The model in float32, with the attention step given to whoever holds the session."""
    import transformers

    transformers.AttentionInterface.register(NAME, _attention)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
    return model.to(device).eval()


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, session: Any, **_: Any
) -> tuple[Tensor, None]:
    return session.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


@dataclass
class Session:
    """Keys, values and newest queries of one session. All heads hold the same number of tokens, each its own."""

    model: Any
    length: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)  # layer -> [Hkv, n, D]
    values: dict[int, Tensor] = field(default_factory=dict)
    positions: dict[int, Tensor] = field(default_factory=dict)  # layer -> [Hkv, n]
    queries: dict[int, list[list[Tensor]]] = field(default_factory=dict)  # layer -> phase -> newest [Hq, D]
    scale: float = 1.0
    _phases: Sequence[int] = ()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query `[Hq, T, D]`, key and value `[Hkv, T, D]` of new tokens -> output `[T, Hq, D]`. Remembers all three."""
        heads, new, _ = key.shape
        where = torch.arange(self.length, self.length + new, device=key.device).repeat(heads, 1)
        if layer in self.keys:
            key = torch.cat([self.keys[layer], key], dim=1)
            value = torch.cat([self.values[layer], value], dim=1)
            where = torch.cat([self.positions[layer], where], dim=1)
        self.keys[layer], self.values[layer], self.positions[layer], self.scale = key, value, where, scale
        rings = self.queries.setdefault(layer, [[] for _ in range(PHASES)])
        for token, phase in enumerate(self._phases):
            rings[phase] = [*rings[phase], query[:, token]][-NEWEST:]
        group = query.shape[0] // heads
        logits = query @ key.repeat_interleave(group, 0).transpose(1, 2) * scale
        future = torch.ones(new, key.shape[1], dtype=torch.bool, device=key.device).triu(key.shape[1] - new + 1)
        weights = logits.masked_fill(future, float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1)

    @torch.no_grad()
    def feed(self, ids: Sequence[int], phases: Sequence[int]) -> Tensor:
        """Computes tokens at the next positions: logits `[T, V]` after each of them."""
        device = next(self.model.parameters()).device
        if not ids:
            return torch.empty(0, 0, device=device)
        self._phases = phases
        where = torch.arange(self.length, self.length + len(ids), device=device)[None]
        batch = torch.tensor([list(ids)], device=device)
        logits = self.model(input_ids=batch, position_ids=where, use_cache=False, session=self).logits[0]
        self.length += len(ids)
        return torch.as_tensor(logits).float()

    def chosen(self, count: int) -> Tensor:
        """`[L, Hkv, count]` positions that the `agentkv` policy keeps now, by its definition."""
        return torch.stack([self._chosen(layer, count) for layer in sorted(self.keys)])

    def _chosen(self, layer: int, count: int) -> Tensor:
        queries = torch.stack([query for ring in self.queries[layer] for query in ring])  # [U, Hq, D]
        kept = []
        for key, where, mine in zip(
            self.keys[layer], self.positions[layer], queries.chunk(self.keys[layer].shape[0], dim=1), strict=True
        ):
            logits = torch.einsum("ugd,nd->ugn", mine, key) * self.scale
            mass = logits.amax(1).softmax(-1).mean(0)
            score = torch.nn.functional.max_pool1d(mass[None, None], POOL, 1, POOL // 2)[0, 0]
            score[where < SINKS] = float("inf")
            score[-RECENT:] = float("inf")
            order = torch.sort(score, descending=True, stable=True).indices[:count]
            kept.append(where[order.sort().values])
        return torch.stack(kept)

    def keep(self, kept: Tensor) -> None:
        """Drops everything but these positions `[L, Hkv, K]`.

        Raises:
            ValueError: one of them is not held.
        """
        for order, layer in enumerate(sorted(self.keys)):
            index = torch.searchsorted(self.positions[layer], kept[order])
            index = index.clamp(max=self.positions[layer].shape[1] - 1)
            if not torch.equal(self.positions[layer].gather(1, index), kept[order]):
                raise ValueError(f"layer {layer}, length {self.length}: kept tokens that were not held")
            self.positions[layer] = kept[order]
            for cache in (self.keys, self.values):
                cache[layer] = cache[layer].gather(1, index[:, :, None].expand(-1, -1, cache[layer].shape[-1]))
