"""A Hugging Face causal model whose attention and cache are ours to see.

The model runs with its own modules (embeddings, projections, norms, RoPE, MLP). Only the attention step is taken
over, through transformers' public registry of attention functions: it receives queries, keys and values after RoPE.
"""

from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from transformers import AttentionInterface

NAME = "agentkv_oracle"


class Memory(Protocol):
    """Whoever holds the keys and values of the run."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query [Hq, T, D], key and value [Hkv, T, D] of the new tokens -> output [T, Hq, D]."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    memory: Memory,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    return memory.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(NAME, _attention)


def load_model(folder: Path) -> torch.nn.Module:
    """The model of `folder` in fp32, in evaluation mode."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=NAME, trust_remote_code=True
    )
    return model.eval()


@torch.no_grad()
def forward(model: torch.nn.Module, ids: list[int], first: int, memory: Memory) -> torch.Tensor:
    """Feed `ids`, the first of them at position `first`; returns the logits [V] after the last one."""
    positions = torch.arange(first, first + len(ids))[None]
    output = model(
        input_ids=torch.tensor([ids]), position_ids=positions, use_cache=False, logits_to_keep=1, memory=memory
    )
    return output.logits[0, -1].float()
