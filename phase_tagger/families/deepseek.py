"""DeepSeek: R1 and V3 (fenced JSON between control tokens), V3.1 (no fence), V3.2 and V4 (DSML)."""

from __future__ import annotations

from .family import THINK, Block, Family

_USER, _ASSISTANT, _EOS = "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
_CALLS = Block("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = "<｜tool▁call▁begin｜>"
_OUTPUTS = Block("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>")
_OUTPUT = Block("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
_LATENT = "latent attention keeps one compressed KV for all heads: per-head eviction does not apply"

DEEPSEEK_R1 = Family(
    name="deepseek-r1",
    title="DeepSeek V3, R1 and distilled models",
    think=(THINK,),
    act=(_CALLS,),
    call=(_CALL,),
    tool=(_OUTPUTS, _OUTPUT),
    turn_end=(_EOS,),
    turn_start=(_USER, _ASSISTANT, _OUTPUTS.open, _OUTPUT.open),
    needs=(_USER, _ASSISTANT),
    hints=("<｜tool▁outputs▁begin｜>",),
    drift="C",
)
DEEPSEEK_V31 = Family(
    name="deepseek-v3.1",
    title="DeepSeek V3.1",
    think=(THINK,),
    act=(_CALLS,),
    call=(_CALL,),
    tool=(_OUTPUT,),
    turn_end=(_EOS,),
    turn_start=(_USER, _ASSISTANT, _OUTPUT.open),
    needs=(_USER, _ASSISTANT),
    hints=("<｜tool▁output▁begin｜>",),
    lacks=("<｜tool▁outputs▁begin｜>",),
    drift="C",
    unserved=_LATENT,
)
DEEPSEEK_V32 = Family(
    name="deepseek-v3.2",
    title="DeepSeek V3.2",
    think=(THINK,),
    act=(Block("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),),
    tool=(Block("<function_results>", "</function_results>"), Block("<result>", "</result>")),
    turn_end=(_EOS,),
    turn_start=(_USER, _ASSISTANT),
    needs=(_USER, _ASSISTANT),
    hints=("DSML", "function_calls"),
    drift="B",
    unserved=_LATENT,
)
DEEPSEEK_V4 = Family(
    name="deepseek-v4",
    title="DeepSeek V4",
    think=(THINK,),
    act=(Block("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),),
    tool=(Block("<tool_result>", "</tool_result>"),),
    turn_end=(_EOS,),
    turn_start=(_USER, _ASSISTANT),
    needs=(_USER, _ASSISTANT),
    hints=("DSML", "tool_calls"),
    lacks=("function_calls",),
    drift="A",
    unserved=_LATENT,
)
DEEPSEEK_PLAIN = Family(
    name="deepseek",
    title="DeepSeek without tools in its template",
    think=(THINK,),
    act=(_CALLS,),
    call=(_CALL,),
    tool=(_OUTPUTS, _OUTPUT),
    turn_end=(_EOS,),
    turn_start=(_USER, _ASSISTANT),
    needs=(_USER, _ASSISTANT),
    drift="C",
)
FAMILIES = (DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_R1, DEEPSEEK_PLAIN)
