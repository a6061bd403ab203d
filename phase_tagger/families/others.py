"""Families with one model line each: MiniMax M2, Phi-4-mini, LFM2, Seed-OSS."""

from __future__ import annotations

from .family import CHATML_START, EOT, THINK, TOOL_RESPONSE, Block, Family

MINIMAX_M2 = Family(
    name="minimax-m2",
    title="MiniMax M2",
    think=(THINK,),
    act=(Block("<minimax:tool_call>", "</minimax:tool_call>"),),
    tool=(Block("<response>", "</response>"),),
    turn_end=("[e~[",),
    turn_start=("]~b]",),
    needs=("]~b]", "[e~["),
    hints=("]~b]",),
    drift="B",
)
PHI4_MINI = Family(
    name="phi4-mini",
    title="Phi-3, Phi-4-mini",
    act=(Block("<|tool_call|>", "<|/tool_call|>"), Block("functools[", None)),
    turn_end=("<|end|>", "<|endoftext|>"),
    turn_start=("<|system|>", "<|user|>", "<|assistant|>", "<|tool_response|>"),
    needs=("<|end|>", "<|user|>", "<|assistant|>"),
    hints=("<|end|>", "<|user|>"),
    lacks=("<tool_calls>",),
)
LFM2 = Family(
    name="lfm2",
    title="LFM2, LFM2.5",
    think=(THINK,),
    act=(Block("<|tool_call_start|>", "<|tool_call_end|>"),),
    tool=(Block("<|tool_response_start|>", "<|tool_response_end|>"),),
    turn_end=(EOT,),
    turn_start=CHATML_START,
    needs=("<|im_start|>", "<|tool_call_start|>"),
    drift="C",
    unserved="hybrid attention (short convolutions keep a state that cannot be evicted)",
)
SEED_OSS = Family(
    name="seed-oss",
    title="Seed-OSS",
    think=(Block("<seed:think>", "</seed:think>"),),
    act=(Block("<seed:tool_call>", "</seed:tool_call>"),),
    tool=(TOOL_RESPONSE,),
    turn_end=("<seed:eos>",),
    turn_start=("<seed:bos>",),
    needs=("<seed:bos>", "<seed:eos>"),
    drift="A",
)
FAMILIES = (MINIMAX_M2, PHI4_MINI, LFM2, SEED_OSS)
