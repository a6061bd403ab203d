"""Tiny random models of every family that the engine serves, each a Hugging Face folder made in a second.

The weights are random but not meek: queries and keys are scaled so that attention is sharp (a keep-set then has real
winners), and the output head so that greedy decoding has clear margins and now and then speaks a phase marker.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
CHATML = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """What is special about one family: its configuration class and the fields that differ from the common ones."""

    config: str
    fields: dict[str, Any] = field(default_factory=dict)


def _block(heads_in_group: int | None, ffn: float | None) -> dict[str, Any]:
    return {
        "attention": {"no_op": heads_in_group is None, "n_heads_in_group": heads_in_group},
        "ffn": {"no_op": ffn is None, "ffn_mult": ffn},
    }


FAMILIES = {
    "llama-gqa": Family("LlamaConfig"),
    "llama-mha": Family("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-mqa": Family("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-one-layer": Family("LlamaConfig", {"num_hidden_layers": 1}),
    "llama-scaled-rope": Family(
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "qwen2.5": Family("Qwen2Config", {"head_dim": None}),
    "qwen3": Family("Qwen3Config", {"num_hidden_layers": 3}),
    "nemotron-nas": Family(
        "DeciLMConfig",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "block_configs": [
                _block(2, 1.0),
                _block(None, 4.0),
                _block(2, None),
                _block(None, None),
                _block(2, 2.5),
            ],
        },
    ),
}

REFUSED = {
    # family -> what its attention has that a compressed row cannot serve
    "gemma2": Family("Gemma2Config", {"sliding_window": 64, "query_pre_attn_scalar": 16}),
    "deepseek-mla": Family(
        "DeepseekV2Config",
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 2,
        },
    ),
    "nemotron-nas-varied-heads": Family(
        "DeciLMConfig",
        {"num_hidden_layers": 2, "block_configs": [_block(2, 1.0), _block(4, 1.0)]},
    ),
}


def write_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer without merges: 256 bytes, the ChatML control tokens, the phase markers. -> its size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(MARKERS))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=SPECIAL[0], chat_template=CHATML
    )
    fast.save_pretrained(folder)
    return len(fast)


def _scale(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if weight.dim() == 1:
        level = 1.7 if "q_norm" in name or "k_norm" in name else float("norm" in name)
        return level + 0.1 * torch.randn(weight.shape, generator=generator)
    gain = {"q_proj": 1.6, "k_proj": 1.6, "embed_tokens": weight.shape[1] ** 0.5, "lm_head": 2.0}
    factor = next((value for key, value in gain.items() if key in name), 1.0)
    return torch.randn(weight.shape, generator=generator) * factor * weight.shape[1] ** -0.5


def write_model(folder: Path, name: str, seed: int = 0, **overrides: Any) -> Path:
    """Write the model `name` of FAMILIES or REFUSED into `folder` (made if missing) and return it.

    `overrides` are configuration fields. Deterministic in `seed`.
    """
    family = (FAMILIES | REFUSED)[name]
    folder.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(folder)
    fields: dict[str, Any] = {
        "vocab_size": -(-size // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 256 + SPECIAL.index(END),
        "pad_token_id": 256,
        **family.fields,
        **overrides,
    }
    if fields["head_dim"] is None:
        del fields["head_dim"]
    model = _empty_model(folder, family.config, fields)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            weight.copy_(_scale(key, weight, generator))
        # Markers stand a little out, so that greedy text changes phase by itself.
        model.lm_head.weight[256 + len(SPECIAL) : size] *= 1.2
        model.lm_head.weight[size:] = 0
    model.save_pretrained(folder)
    if family.config == "DeciLMConfig":
        _write_decilm_config(folder, fields)
    return folder


def _empty_model(folder: Path, config: str, fields: dict[str, Any]) -> Any:
    if config != "DeciLMConfig":
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, config)(**fields), dtype=torch.float32
        )
    for source in (Path(__file__).parent / "nemotron_nas").glob("*.py"):
        shutil.copy(source, folder)
    _write_decilm_config(folder, fields)
    own = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return transformers.AutoModelForCausalLM.from_config(own, dtype=torch.float32, trust_remote_code=True)


def _write_decilm_config(folder: Path, fields: dict[str, Any]) -> None:
    """As published folders have it: no number of KV heads at the top, the blocks tell it."""
    published = {key: value for key, value in fields.items() if key != "num_key_value_heads"}
    published |= {
        "model_type": "nemotron-nas",
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_decilm.DeciLMConfig",
            "AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM",
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(published, indent=2))
