"""One table per model family, found by the vocabulary and the chat template."""

from __future__ import annotations

from dataclasses import replace

from . import (
    deepseek,
    gemma,
    glm,
    granite,
    harmony,
    hermes,
    kimi,
    llama,
    mistral,
    nemotron,
    others,
    qwen,
    smollm,
)
from .family import TOOL_CALL, TOOL_RESPONSE, Block, Family
from .plain import PLAIN

# Special families first: detection takes the first table that fits.
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *harmony.FAMILIES,
        *gemma.FAMILIES,
        *deepseek.FAMILIES,
        *kimi.FAMILIES,
        *glm.FAMILIES,
        *mistral.FAMILIES,
        *granite.FAMILIES,
        *nemotron.FAMILIES,
        *others.FAMILIES,
        *llama.FAMILIES,
        *hermes.FAMILIES,
        *smollm.FAMILIES,
        *qwen.FAMILIES,
        hermes.CHATML,
        PLAIN,
    )
}


class UnknownFamilyError(ValueError):
    """No family of that name."""


TOOLS_SUFFIX = "+tools"


def get_family(name: str) -> Family:
    """The family of that name; `name+tools` is the family when our own tools template serves it.

    Raises `UnknownFamilyError` that lists the known names.
    """
    base = name.removesuffix(TOOLS_SUFFIX)
    if base not in FAMILIES:
        raise UnknownFamilyError(f"unknown family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[base] if base == name else with_tools(FAMILIES[base])


def with_tools(family: Family) -> Family:
    """The family with the markers of our own tools template; itself when it has them already."""
    if TOOL_CALL in family.act and TOOL_RESPONSE in family.tool:
        return family
    act = family.act if TOOL_CALL in family.act else (*family.act, TOOL_CALL)
    tool = family.tool if TOOL_RESPONSE in family.tool else (*family.tool, TOOL_RESPONSE)
    return replace(family, name=family.name + TOOLS_SUFFIX, act=act, tool=tool)


__all__ = ["FAMILIES", "PLAIN", "Block", "Family", "UnknownFamilyError", "get_family", "with_tools"]
