"""Nemotron: markers of several plain tokens on the Llama vocabulary; v3 is on ChatML."""

from __future__ import annotations

from .family import CHATML_START, EOT, THINK, TOOL_CALL, TOOL_RESPONSE, Block, Family

_CALL = Block("<TOOLCALL>", "</TOOLCALL>")
_RESPONSE = Block("<TOOL_RESPONSE>", "</TOOL_RESPONSE>")

NEMOTRON = Family(
    name="nemotron",
    title="Llama-3.x-Nemotron Nano, Super, Ultra",
    think=(THINK,),
    act=(_CALL,),
    tool=(_RESPONSE,),
    turn_end=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    turn_start=("<|start_header_id|>",),
    needs=("<|start_header_id|>", "<|eot_id|>"),
    hints=("<TOOLCALL>",),
    header=("<|start_header_id|>", "<|end_header_id|>\n\n"),
    drift="C",
)
NEMOTRON_NANO2 = Family(
    name="nemotron-nano-v2",
    title="Nemotron Nano v2",
    think=(THINK,),
    act=(_CALL,),
    tool=(_RESPONSE,),
    turn_end=("<SPECIAL_12>",),
    turn_start=("<SPECIAL_10>", "<SPECIAL_11>"),
    hints=("<SPECIAL_11>", "<TOOLCALL>"),
    drift="C",
    unserved="hybrid attention (Mamba layers keep a state that cannot be evicted)",
)
NEMOTRON3 = Family(
    name="nemotron3",
    title="Nemotron 3",
    think=(THINK,),
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=(EOT,),
    turn_start=CHATML_START,
    hints=("truncate_history_thinking", "<|im_start|>"),
    drift="B",
    unserved="hybrid attention (Mamba layers keep a state that cannot be evicted)",
)
FAMILIES = (NEMOTRON_NANO2, NEMOTRON3, NEMOTRON)
