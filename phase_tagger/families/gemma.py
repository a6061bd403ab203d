"""Gemma 3 (no tool role in its template) and Gemma 4 (thought channel, call tokens)."""

from __future__ import annotations

from .family import TOOL_CALL, TOOL_RESPONSE, Block, Family

GEMMA3 = Family(
    name="gemma3",
    title="Gemma 2, Gemma 3",
    act=(TOOL_CALL, Block("```tool_code", "```")),
    tool=(TOOL_RESPONSE,),
    turn_end=("<end_of_turn>", "<eos>"),
    turn_start=("<start_of_turn>",),
    needs=("<start_of_turn>", "<end_of_turn>"),
    hints=("<start_of_turn>",),
    header=("<start_of_turn>", "\n"),
    roles={"assistant": "model", "system": "user"},
    unserved="interleaved sliding windows",
    drift="A",
)
GEMMA4 = Family(
    name="gemma4",
    title="Gemma 4",
    think=(Block("<|channel>", "<channel|>"),),
    act=(Block("<|tool_call>", "<tool_call|>"),),
    tool=(Block("<|tool_response>", "<tool_response|>"),),
    turn_end=("<turn|>", "<|tool_response>", "<eos>"),
    turn_start=("<|turn>",),
    needs=("<|turn>", "<turn|>"),
    hints=("<|turn>",),
    unserved="interleaved sliding windows",
    drift="B",
)
FAMILIES = (GEMMA4, GEMMA3)
