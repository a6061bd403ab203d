"""One table per model family, found by the vocabulary and the chat template."""

from __future__ import annotations

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
from .family import Block, Family
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


def get_family(name: str) -> Family:
    """The family of that name; raises `UnknownFamilyError` that lists the known names."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise UnknownFamilyError(f"unknown family {name!r}; known: {', '.join(sorted(FAMILIES))}") from None


__all__ = ["FAMILIES", "PLAIN", "Block", "Family", "UnknownFamilyError", "get_family"]
