"""Phase tagger: which phase of the agent loop every token of a transcript belongs to.

A small library of its own: no torch, no gateway, no engine. Structure decides, never the text.
"""

from .automaton import Automaton, build_automaton
from .families import Block, Family, get_family
from .families.detect import detect_family
from .labels import DEFAULT_FOLD, Label, Phase, Run, fold, fold_table
from .vocabulary import Vocabulary

__all__ = [
    "DEFAULT_FOLD",
    "Automaton",
    "Block",
    "Family",
    "Label",
    "Phase",
    "Run",
    "Vocabulary",
    "build_automaton",
    "detect_family",
    "fold",
    "fold_table",
    "get_family",
]
