"""Which family a tokenizer and its chat template belong to."""

from __future__ import annotations

from ..vocabulary import Vocabulary
from . import FAMILIES, PLAIN
from .family import Family


def detect_family(tokenizer: object | None, chat_template: str | None) -> Family:
    """The first family whose tokens the vocabulary has and whose texts the template holds, else "plain".

    `tokenizer` may be a `Vocabulary` or anything that `Vocabulary` takes; None decides by the template alone.
    """
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) or tokenizer is None else Vocabulary(tokenizer)
    template = chat_template or ""

    def has(token: str) -> bool:
        return token in template if vocabulary is None else vocabulary.id_of(token) is not None

    for family in FAMILIES.values():
        fits = all(map(has, family.needs)) and all(hint in template for hint in family.hints)
        if fits and not any(text in template for text in family.lacks) and (family.needs or family.hints):
            return family
    return PLAIN
