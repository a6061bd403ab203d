"""SmolLM on ChatML. SmolLM2's markers are all plain text; tools are rendered by our built-in template."""

from __future__ import annotations

from .family import CHATML_START, EOS, EOT, THINK, TOOL_CALL, TOOL_RESPONSE, Block, Family

SMOLLM3 = Family(
    name="smollm3",
    title="SmolLM3",
    think=(THINK,),
    act=(TOOL_CALL, Block("<code>", "</code>")),
    tool=(TOOL_RESPONSE,),
    turn_end=(EOT, EOS),
    turn_start=CHATML_START,
    needs=("<|im_start|>", "<|im_end|>"),
    hints=("reasoning_mode", "SmolLM"),
    drift="C",
)
SMOLLM2 = Family(
    name="smollm2",
    title="SmolLM2",
    think=(THINK,),
    act=(TOOL_CALL,),
    tool=(TOOL_RESPONSE,),
    turn_end=(EOT, EOS),
    turn_start=CHATML_START,
    needs=("<|im_start|>", "<|im_end|>", "<jupyter_start>"),
    lacks=("<tool_response>",),
    drift="A",
)
FAMILIES = (SMOLLM3, SMOLLM2)
