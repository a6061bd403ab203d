"""What a model's config.json says of its attention: its KV heads, or why its KV cannot be compressed.

Read before anything is loaded. The worker looks at the model's layers themselves once they exist (`engine/build.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FULL = {"full_attention", "attention"}
STATE_SPACE = ("mamba", "ssm_", "linear_num_", "hybrid_override_pattern")
"""Beginnings of configuration fields that only models with state-space or linear-attention layers have."""


@dataclass(frozen=True)
class AttentionShape:
    """`layers` counts those with attention; `head_dim` is one KV head's size."""

    layers: int
    kv_heads: int
    head_dim: int


def refusal(config: dict[str, Any]) -> str | None:
    """Why sessions of this model cannot be compressed; None where nothing in its configuration speaks against it."""
    config = config.get("text_config") or config
    kinds = {str(kind) for kind in (config.get("layer_types") or config.get("layers_block_type") or ())} - FULL
    if config.get("kv_lora_rank"):
        return "has multi-head latent attention (MLA): its KV cache has no KV heads"
    if any("mamba" in kind or "linear" in kind for kind in kinds) or any(
        name.startswith(STATE_SPACE) for name, value in config.items() if value is not None
    ):
        return "has state-space or linear-attention layers, whose state cannot be cut"
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and window < config.get("max_position_embeddings", window + 1):
        return "uses sliding-window attention, which has no KV left to choose from"
    if kinds:
        return f"has layers of other kinds than full attention: {', '.join(sorted(kinds))}"
    if config.get("is_encoder_decoder"):
        return "has an encoder: only models that read their own text backwards can be served"
    groups = {block["n_heads_in_group"] for block in _attention_blocks(config)}
    if len(groups) > 1:
        return "has Variable GQA, layers that differ in their KV heads: SGLang itself does not serve it"
    return None


def shape(config: dict[str, Any]) -> AttentionShape:
    """The shape of a model that `refusal` lets pass.

    Raises:
        KeyError: the configuration lacks a number that every decoder model gives.
    """
    config = config.get("text_config") or config
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    if blocks := _attention_blocks(config):
        layers, kv_heads = len(blocks), heads // blocks[0]["n_heads_in_group"]
    return AttentionShape(layers, kv_heads, config.get("head_dim") or config["hidden_size"] // heads)


def _attention_blocks(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The attention of Nemotron-NAS layers that have one; empty for models whose layers are all alike."""
    blocks = [block.get("attention") or {} for block in config.get("block_configs") or ()]
    return [block for block in blocks if block.get("n_heads_in_group")]
