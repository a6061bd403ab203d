"""Kimi K2 and K2 Thinking: a section of calls between control tokens."""

from __future__ import annotations

from .family import THINK, Block, Family

KIMI_K2 = Family(
    name="kimi-k2",
    title="Kimi K2, K2 Thinking",
    think=(THINK,),
    act=(Block("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
    turn_end=("<|im_end|>",),
    turn_start=("<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
    needs=("<|im_user|>", "<|im_middle|>"),
    hints=("<|im_middle|>",),
    drift="A",
    unserved="latent attention keeps one compressed KV for all heads: per-head eviction does not apply",
)
FAMILIES = (KIMI_K2,)
