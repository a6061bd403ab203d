"""Nemotron-NAS (DeciLM) from transformers' Llama modules: the reference for SGLang's own implementation.

A layer may have no attention, or no FFN; the FFN width is `2/3 * ffn_mult * hidden_size`, rounded up to 256.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from .configuration_decilm import DeciLMConfig


class DeciLMLayer(nn.Module):
    def __init__(self, config: DeciLMConfig, index: int) -> None:
        super().__init__()
        block = config.block_configs[index]
        if not block.attention.no_op:
            own = copy.copy(config)
            own.num_key_value_heads = config.num_attention_heads // block.attention.n_heads_in_group
            self.self_attn = LlamaAttention(own, index)
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if not block.ffn.no_op:
            own = copy.copy(config)
            own.intermediate_size = -(-int(2 * block.ffn.ffn_mult * config.hidden_size / 3) // 256) * 256
            self.mlp = LlamaMLP(own)
            self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], **kwargs: Any) -> torch.Tensor:
        if hasattr(self, "self_attn"):
            attended, _ = self.self_attn(self.input_layernorm(hidden), rotary, **kwargs)
            hidden = hidden + attended
        if hasattr(self, "mlp"):
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class DeciLMModel(nn.Module):
    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DeciLMLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)


class DeciLMForCausalLM(PreTrainedModel):
    config_class = DeciLMConfig
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(config)
        self.model = DeciLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: int = 0,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutput:
        hidden = self.model.embed_tokens(input_ids)
        rotary = self.model.rotary_emb(hidden, position_ids=position_ids)
        for layer in self.model.layers:
            hidden = layer(hidden, rotary, attention_mask=None, **kwargs)
        hidden = self.model.norm(hidden)
        return CausalLMOutput(logits=self.lm_head(hidden[:, -logits_to_keep:]))
