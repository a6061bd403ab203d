"""Phase tagger: which phase of the agent loop every token of a transcript belongs to.

A small library of its own: no torch, no gateway, no engine. Structure decides, never the text.
"""

from .automaton import Automaton, build_automaton
from .chat_format import ChatFormat
from .families import Block, Family, UnknownFamilyError, get_family
from .families.detect import detect_family
from .formats.chat import MessageError, read_messages
from .labels import DEFAULT_FOLD, Label, Phase, Run, fold, fold_table
from .render import AppendError, Options, Part, Rendered, render_appended, render_prompt
from .stream import TextLabeller, label_text
from .template import TemplateError
from .vocabulary import TokenizerError, Vocabulary

__all__ = [
    "DEFAULT_FOLD",
    "AppendError",
    "Automaton",
    "Block",
    "ChatFormat",
    "Family",
    "Label",
    "MessageError",
    "Options",
    "Part",
    "Phase",
    "Rendered",
    "Run",
    "TemplateError",
    "TextLabeller",
    "TokenizerError",
    "UnknownFamilyError",
    "Vocabulary",
    "build_automaton",
    "detect_family",
    "fold",
    "fold_table",
    "get_family",
    "label_text",
    "read_messages",
    "render_appended",
    "render_prompt",
]
