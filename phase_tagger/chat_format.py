"""What a model needs to be spoken to: vocabulary, chat template, family; and which template serves tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from .automaton import Automaton, build_automaton
from .builtin import TOOLS_TEMPLATE, template_arguments
from .families import get_family, with_tools
from .families.detect import detect_family
from .families.family import Family
from .formats.chat import Conversation
from .skeleton import Skeletons
from .template import ChatTemplate, tools_reach_the_prompt
from .vocabulary import Vocabulary

ToolsTemplate = Literal["auto", "own", "model"]
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatFormat:
    """A vocabulary with its chat template and family.

    `tokenizer`: a `Vocabulary` or anything that `Vocabulary` takes. `template`: Jinja text; None uses our own.
    `family`: a family or its name; default detected. `tokens`: values of `bos_token`, … for the template.
    `tools_template`: which template serves conversations with tools. "auto": the model's, or our own where the
    model's cannot show tools, calls and results; "own": always ours; "model": always the model's.
    """

    def __init__(
        self,
        tokenizer: object,
        template: str | None = None,
        *,
        family: Family | str | None = None,
        tokens: Mapping[str, str] | None = None,
        tools_template: ToolsTemplate = "auto",
    ) -> None:
        self.vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        if family is None:
            family = detect_family(self.vocabulary, template)
        self.family = get_family(family) if isinstance(family, str) else family
        self.template = ChatTemplate(template, tokens) if template else None
        self.tools_template = tools_template
        self._tokens = dict(tokens or {})
        self._automata: dict[str, Automaton] = {}
        self.skeletons = Skeletons()

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        template: str | None = None,
        family: Family | str | None = None,
        tools_template: ToolsTemplate = "auto",
    ) -> ChatFormat:
        """Read a model folder: tokenizer.json, and the chat template from where Hugging Face keeps it."""
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        tokens = {name: text for name in _TOKENS if (text := _token_text(config.get(name)))}
        return cls(
            folder,
            template or _find_template(folder, config),
            family=family,
            tokens=tokens,
            tools_template=tools_template,
        )

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the model's own template prints tool schemas, calls and results."""
        return self.template is not None and tools_reach_the_prompt(self.template)

    @cached_property
    def has_own_template(self) -> bool:
        """Whether our tools template can write this family's turns with the vocabulary at hand."""
        opener = self.family.header[0]
        return not self.family.turn_end or (bool(opener) and self.vocabulary.id_of(opener) is not None)

    def uses_own(self, tools: Sequence[Any] | None, conversation: Conversation) -> bool:
        """Whether our own template renders this conversation."""
        if self.template is None:
            return True
        with_calls = bool(tools) or conversation.uses_tools
        if self.tools_template == "auto":
            return with_calls and not self.shows_tools and self.has_own_template
        return with_calls and self.tools_template == "own"

    def template_for(self, own: bool) -> tuple[ChatTemplate, Family]:
        """The template to print with, and the family whose markers it and the model's calls then use."""
        if not own and self.template is not None:
            return self.template, self.family
        return self._own, with_tools(self.family)

    @cached_property
    def _own(self) -> ChatTemplate:
        prints_bos = self.template is not None and "bos_token" in self.template.source
        bos = self._tokens.get("bos_token", "") if prints_bos else ""
        values = {**self._tokens, **template_arguments(self.family, bos)}
        return ChatTemplate(TOOLS_TEMPLATE, values)

    def automaton(self, family: Family | str | None = None) -> Automaton:
        """The decode automaton of the family (default: this format's own) on this vocabulary, built once."""
        family = get_family(family) if isinstance(family, str) else (family or self.family)
        if family.name not in self._automata:
            self._automata[family.name] = build_automaton(family, self.vocabulary)
        return self._automata[family.name]

    def ends_turn(self, last: int, first: int) -> bool:
        """Whether a ledger that ends with id `last` holds already the turn end `first`."""
        if last == first:
            return True
        # gpt-oss samples <|return|> where its history says <|end|>.
        ends = {self.vocabulary.id_of(end) for end in self.family.turn_end}
        return self.family.channels and {last, first} <= ends


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    value = json.loads(file.read_text("utf-8"))
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    value = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        value = named.get("tool_use") or named.get("default")
    return value if isinstance(value, str) and value else None
