"""GLM 4.5 to 4.7: no end-of-turn token, the model stops by emitting the next role's token."""

from __future__ import annotations

from .family import THINK, TOOL_CALL, TOOL_RESPONSE, Family

GLM4 = Family(
    name="glm4",
    title="GLM-4.5, 4.6, 4.7",
    think=(THINK,),
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=("<|user|>", "<|observation|>", "<|endoftext|>"),
    turn_start=("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
    needs=("<|user|>", "<|observation|>"),
    hints=("[gMASK]", "<|observation|>"),
    drift="B",
)
FAMILIES = (GLM4,)
