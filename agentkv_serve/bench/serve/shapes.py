"""Model folders without weights: the shape of a real model, for servers started with `--load-format dummy`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    },
}
"""Configurations of published models; speed depends on the shape, not on the weights' values."""

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write_shape(shape: str, tokenizer: Path, folder: Path) -> Path:
    """Writes a model folder of that shape into `folder`, with the tokenizer of another model (its ids are valid ones
    wherever the vocabulary is larger). Returns the folder."""
    target = folder / shape
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
    for name in _TOKENIZER:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, target / name)
    return target
