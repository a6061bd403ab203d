"""Mistral: `[TOOL_CALLS]` with a JSON list (Nemo) or name and `[ARGS]` (Small 3.2 and later), `[THINK]`."""

from __future__ import annotations

from .family import Block, Family

_CALLS = Block("[TOOL_CALLS]", None)
_RESULTS = Block("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_CONTENT = Block("[TOOL_CONTENT]", None)
_START = ("[INST]", "[SYSTEM_PROMPT]", "[TOOL_RESULTS]", "[AVAILABLE_TOOLS]")

MAGISTRAL = Family(
    name="magistral",
    title="Magistral, Ministral 3 reasoning",
    think=(Block("[THINK]", "[/THINK]"),),
    act=(_CALLS,),
    tool=(_RESULTS, _CONTENT),
    turn_end=("</s>",),
    turn_start=_START,
    needs=("[INST]",),
    hints=("[TOOL_CALLS]", "[THINK]"),
    drift="A",
)
MINISTRAL = Family(
    name="ministral",
    title="Mistral Small 3.2, Ministral 3, Devstral",
    act=(_CALLS,),
    tool=(_RESULTS, _CONTENT),
    turn_end=("</s>",),
    turn_start=_START,
    needs=("[INST]",),
    hints=("[TOOL_CALLS]", "[ARGS]"),
    lacks=("[THINK]",),
    drift="A",
)
MISTRAL = Family(
    name="mistral",
    title="Mistral Nemo, Small 2409-3.1",
    act=(_CALLS,),
    tool=(_RESULTS, _CONTENT),
    turn_end=("</s>",),
    turn_start=_START,
    needs=("[INST]",),
    hints=("[INST]",),
    drift="D",
)
FAMILIES = (MAGISTRAL, MINISTRAL, MISTRAL)
