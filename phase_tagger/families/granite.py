"""IBM Granite 3.3 and 4."""

from __future__ import annotations

from .family import THINK, TOOL_CALL, TOOL_RESPONSE, Block, Family

_END = ("<|end_of_text|>",)
_START = ("<|start_of_role|>",)

GRANITE3 = Family(
    name="granite3",
    title="Granite 3.x",
    think=(THINK,),
    act=(Block("<|tool_call|>", None),),
    turn_end=_END,
    turn_start=_START,
    needs=("<|start_of_role|>", "<|end_of_role|>"),
    hints=("<|start_of_role|>",),
    lacks=("<tool_call>",),
    header=("<|start_of_role|>", "<|end_of_role|>"),
    drift="C",
)
GRANITE4 = Family(
    name="granite4",
    title="Granite 4.x",
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=_END,
    turn_start=_START,
    needs=("<|start_of_role|>", "<|end_of_role|>"),
    hints=("<|start_of_role|>", "<tool_call>"),
    header=("<|start_of_role|>", "<|end_of_role|>"),
    drift="A",
)
FAMILIES = (GRANITE4, GRANITE3)
