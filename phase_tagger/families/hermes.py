"""Hermes 2 and 3: ChatML turns, prompted JSON calls whose tags are plain text on the Llama vocabulary."""

from __future__ import annotations

from .family import CHATML_START, EOT, THINK, TOOL_CALL, TOOL_RESPONSE, Block, Family

HERMES = Family(
    name="hermes",
    title="Hermes 2 Pro, Hermes 3",
    think=(THINK, Block("<scratch_pad>", "</scratch_pad>")),
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=(EOT, "<|end_of_text|>"),
    turn_start=CHATML_START,
    needs=("<|im_start|>", "<|im_end|>"),
    hints=("<tool_call>", "function calling AI model"),
    drift="C",
)
CHATML = Family(
    name="chatml",
    title="Any other model on ChatML",
    think=(THINK,),
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=(EOT, "<|endoftext|>"),
    turn_start=CHATML_START,
    needs=("<|im_start|>", "<|im_end|>"),
)
FAMILIES = (HERMES,)
