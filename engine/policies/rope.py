"""How a model rotates its queries and keys, for policies that compare tokens at other positions than their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INTERLEAVED = frozenset({"cohere", "cohere2", "ernie4_5", "glm", "glm4", "helium"})
"""Model types of the Hugging Face library whose rotary pairs are neighbours (2f, 2f + 1)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: pair f of a head turns by `frequencies[f]` radians per token."""

    frequencies: Tensor  # [F] fp32; 2 F <= D, dimensions from 2 F on are not rotated
    interleaved: bool = False  # pairs are (2f, 2f + 1) instead of (f, f + F)
    attention_scaling: float = 1.0  # factor on rotated queries and keys (YaRN, LongRoPE)

    @classmethod
    def from_config(cls, config: Any) -> Rope:
        """The rotation that a Hugging Face config describes, by the library's own initialisers.

        Raises:
            ValueError: a scheme whose frequencies change with the length (dynamic), or differ by layer.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = getattr(config, "text_config", None) or config
        interleaved = getattr(config, "model_type", "") in INTERLEAVED
        parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if any(isinstance(value, dict) for value in parameters.values()):
            raise ValueError("the model's layers rotate by different frequencies; policies that need RoPE take one")
        if kind in ("dynamic", "longrope"):
            raise ValueError(f"RoPE of type {kind} changes with the length; policies that need RoPE take a fixed one")
        if kind == "default":
            heads = config.num_attention_heads
            dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            share = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
            base = parameters.get("rope_theta", getattr(config, "rope_theta", None)) or 10000.0
            width = int(dim * share)
            frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
            return cls(frequencies.float(), interleaved)
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
        return cls(frequencies.float(), interleaved, float(scaling))

    def to(self, device: torch.device) -> Rope:
        """The same on another device."""
        return Rope(self.frequencies.to(device), self.interleaved, self.attention_scaling)

    def paired(self, vectors: Tensor) -> Tensor:
        """`vectors` [..., D] with the pairs at (f, f + F): a copy if they are interleaved, else the same tensor."""
        if not self.interleaved:
            return vectors
        width = 2 * self.frequencies.numel()
        return torch.cat([vectors[..., 0:width:2], vectors[..., 1:width:2], vectors[..., width:]], -1)

    def order(self, dim: int) -> Tensor:
        """[D] for every dimension of the model's own pair order its place in the paired order."""
        if not self.interleaved:
            return torch.arange(dim, device=self.frequencies.device)
        return self.paired(torch.arange(dim, device=self.frequencies.device)).argsort()

    def unrotate(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """[..., T, D] fp32 vectors before the rotation, pairs at (f, f + F).

        Args:
            vectors: [..., T, D] as the model rotated them, in its own pair order.
            positions: [T] logical positions.
        """
        pairs = self.frequencies.numel()
        # Angles in float64: a position times a frequency reaches a million radians.
        angles = positions.to(torch.float64)[:, None] * self.frequencies.to(torch.float64)
        cos, sin = angles.cos().float(), angles.sin().float()
        paired = self.paired(vectors).float()
        real, imag, rest = paired[..., :pairs], paired[..., pairs : 2 * pairs], paired[..., 2 * pairs :]
        turned = torch.cat([real * cos + imag * sin, imag * cos - real * sin], -1) / self.attention_scaling
        return torch.cat([turned, rest], -1)
