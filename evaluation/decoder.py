"""A decoder's forward with the cache left to the caller: every policy of a run shares one pass over the weights.

The weights are those of a Hugging Face model (Llama, Mistral, Qwen2 and Qwen3 layouts). Products with weights have
the weights' dtype; attention, norms and the residual stream are fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, q [M, Hq, T, D], k [M, Hkv, T, D], v [M, Hkv, T, D]) -> [M, Hq, T, D]`, fp32; q and k are rotated."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer: `[out, in]` matrices and their biases; projections of one input lie in one matrix."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """The forward pass of a decoder-only model over M sequences ("rows") that hold the same tokens.

    Args:
        compute: dtype of the weights' copies that are multiplied; results are rounded to the model's own. Default:
            the model's, or float32 where the CPU has no arithmetic for it. Both are sums of the same products in
            float32, and float32 is several times faster there.

    Raises `ValueError` for a model whose layers are not one of the known layouts.
    """

    def __init__(self, model: Any, compute: torch.dtype | None = None) -> None:
        config = model.config
        if config.architectures[0] not in ARCHITECTURES or config.hidden_act != "silu":
            raise ValueError(f"{config.architectures[0]} is not one of {', '.join(ARCHITECTURES)}")
        self.layers = config.num_hidden_layers
        self.query_heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.query_heads
        self.scale = self.head_dim**-0.5
        self.eps = config.rms_norm_eps
        self.vocab = config.vocab_size
        inner = model.model
        self.embedding = inner.embed_tokens.weight.detach()
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self._compute = compute or _compute_dtype(self.dtype, self.device)
        self._head = model.lm_head.weight.detach().to(self._compute)
        self.norm = inner.norm.weight.detach().float()
        self._rotary = inner.rotary_emb
        self._layers = [_read_layer(layer, self._compute) for layer in inner.layers]

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
        """Reads a Hugging Face model folder."""
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval())

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[length, D]` fp32 of all positions of a sequence."""
        positions = torch.arange(length, device=self.device)
        cos, sin = self._rotary(torch.zeros(1, device=self.device), positions[None])
        return cos[0], sin[0]

    @torch.inference_mode()
    def forward(self, ids: Tensor, rows: int, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Hidden states `[M, T, H]` fp32 after the last norm, of M = `rows` sequences.

        ids: int64 `[T]` the tokens, the same in every row; rotation: cos and sin `[T, D]` at their positions.
        """
        cos, sin = rotation
        count = ids.numel()
        hidden = self.embedding[ids].float().expand(rows, -1, -1).reshape(rows * count, -1).clone()
        hq, hkv, dim = self.query_heads, self.kv_heads, self.head_dim
        for index, layer in enumerate(self._layers):
            x = self._linear(self._rms(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
            heads = x.view(rows, count, hq + 2 * hkv, dim).transpose(1, 2)
            q, k, v = torch.split(heads, [hq, hkv, hkv], dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._rms(q.float(), layer.q_norm), self._rms(k.float(), layer.k_norm)
            q, k = _rotate(q.float(), cos, sin), _rotate(k.float(), cos, sin)
            mixed = attend(index, q, k, v.float()).transpose(1, 2).reshape(rows * count, hq * dim)
            hidden += self._linear(mixed, layer.out, layer.out_bias)
            x = self._linear(self._rms(hidden, layer.mlp_norm), layer.gate_up)
            gate, up = x.chunk(2, dim=-1)
            hidden += self._linear(silu(gate).mul_(up), layer.down)
        return self._rms(hidden, self.norm).view(rows, count, -1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` fp32 of final hidden states."""
        return self._linear(hidden, self._head).float()

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x.to(self.dtype).to(self._compute), weight, bias).to(self.dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.eps)


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    emulated = dtype == torch.bfloat16 and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return torch.float32 if emulated else dtype


def _read_layer(layer: Any, compute: torch.dtype) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Layer(
        input_norm=layer.input_layernorm.weight.detach().float(),
        qkv=_stack(part.weight for part in projections).to(compute),
        qkv_bias=None if attention.q_proj.bias is None else _stack(part.bias for part in projections).to(compute),
        q_norm=_float(getattr(attention, "q_norm", None)),
        k_norm=_float(getattr(attention, "k_norm", None)),
        out=attention.o_proj.weight.detach().to(compute),
        out_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach().to(compute),
        mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
        gate_up=_stack((mlp.gate_proj.weight, mlp.up_proj.weight)).to(compute),
        down=mlp.down_proj.weight.detach().to(compute),
    )


def _stack(parts: Any) -> Tensor:
    return torch.cat([part.detach() for part in parts])


def _float(norm: Any) -> Tensor | None:
    return None if norm is None else norm.weight.detach().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the half-split layout. x: `[M, H, T, D]`."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def causal_mask(count: int, held: int, device: torch.device) -> Tensor:
    """Additive mask `[T, held]` of T new tokens that are the last of `held` keys: each sees what is not after it."""
    mask = torch.zeros(count, held, device=device)
    mask[:, held - count :].masked_fill_(torch.ones(count, count, dtype=torch.bool, device=device).triu(1), -torch.inf)
    return mask
