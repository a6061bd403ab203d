"""Qwen and its relatives on ChatML: JSON calls, or function/parameter XML, inside `<tool_call>`."""

from __future__ import annotations

from .family import CHATML_START, EOS, EOT, THINK, TOOL_CALL, TOOL_RESPONSE, Family

_CHATML = (EOT, EOS)

QWEN25 = Family(
    name="qwen2.5",
    title="Qwen2.5, Qwen2.5-Coder, Qwen3-2507-Instruct",
    think=(THINK,),  # only prompted: in this vocabulary the tags are plain text
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=_CHATML,
    turn_start=CHATML_START,
    needs=("<|im_start|>", "<|im_end|>"),
    hints=("<tool_call>", "<tool_response>"),
    lacks=("<think>", "</think>", "<function="),
    drift="A",
)
QWEN3 = Family(
    name="qwen3",
    title="Qwen3 hybrid, QwQ",
    think=(THINK,),
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=_CHATML,
    turn_start=CHATML_START,
    needs=("<|im_start|>", "<|im_end|>", "<tool_call>", "<tool_response>"),
    hints=("<tool_call>", "</think>"),
    lacks=("<function=",),
    drift="B",
)
QWEN3_CODER = Family(
    name="qwen3-coder",
    title="Qwen3-Coder",
    think=(THINK,),
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=_CHATML,
    turn_start=CHATML_START,
    needs=("<|im_start|>", "<|im_end|>"),
    hints=("<function=",),
    lacks=("</think>",),
    drift="A",
)
QWEN35 = Family(
    name="qwen3.5",
    title="Qwen3.5, Qwen3.6, Qwen3.8",
    think=(THINK,),
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=_CHATML,
    turn_start=CHATML_START,
    needs=("<|im_start|>", "<|im_end|>"),
    hints=("<function=", "</think>"),
    drift="B",
    unserved="hybrid attention (linear layers keep a state that cannot be evicted)",
)
FAMILIES = (QWEN35, QWEN3_CODER, QWEN3, QWEN25)
