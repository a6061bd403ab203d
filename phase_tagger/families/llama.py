"""Llama 3.x: an unmarked JSON call, or `<|python_tag|>`."""

from __future__ import annotations

from .family import Block, Family

LLAMA3 = Family(
    name="llama3",
    title="Llama 3.1, 3.2, 3.3",
    act=(Block("<|python_tag|>", None),),
    turn_end=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    turn_start=("<|start_header_id|>",),
    bare_call="{",
    needs=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    lacks=("<TOOLCALL>",),
    header=("<|start_header_id|>", "<|end_header_id|>\n\n"),
    drift="A",
)
FAMILIES = (LLAMA3,)
