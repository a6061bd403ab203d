"""Prompts of sessions: token ids and labels, by the phase tagger."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agentkv_serve.gateway.sessions.ledger import Runs, Turn
from agentkv_serve.phase_tagger import Label
from agentkv_serve.phase_tagger.chat_format import ChatFormat
from agentkv_serve.phase_tagger.families import with_tools
from agentkv_serve.phase_tagger.formats.chat import MessageError
from agentkv_serve.phase_tagger.labels import flatten_runs, runs_of
from agentkv_serve.phase_tagger.render import AppendError, Options, Rendered, render_appended, render_prompt
from agentkv_serve.phase_tagger.template import TemplateError

NOT_OPEN = -1


class PromptError(ValueError):
    """Messages that the model's chat template refuses."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """New tokens of a request: `ids`, their flat `runs` from 0, and how the reply to them is to be labelled."""

    ids: array[int]
    runs: Runs
    family: str
    initial: str


@dataclass(frozen=True, slots=True)
class Output:
    """Labels of sampled tokens: flat `runs` from 0, and the label of the block that they leave open or NOT_OPEN."""

    runs: Runs
    open_block: int


class Renderer:
    """The chat template, vocabulary and decode automaton of one model; safe to use from several threads."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        # Built now: the first turn should not wait for tables.
        chat.automaton()
        chat.automaton(with_tools(chat.family))

    @classmethod
    def load(cls, folder: Path) -> Renderer:
        """Read a model folder. Raises ValueError that says what is missing."""
        return cls(ChatFormat.from_folder(folder))

    def whole(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        constrained: bool = False,
    ) -> Prompt:
        """The whole prompt. `constrained`: the engine will force a tool call. Raises PromptError."""
        try:
            return _prompt(render_prompt(self._chat, messages, tools, kwargs, Options(constrained=constrained)))
        except (TemplateError, MessageError) as error:
            raise PromptError(str(error)) from error

    def appended(
        self,
        messages: Sequence[Mapping[str, Any]],
        start: int,
        tools: Sequence[dict[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        last: Turn,
        constrained: bool = False,
    ) -> Prompt:
        """Only `messages[start:]`, to stand after the turn `last`, which ends with `messages[start - 1]`."""
        block = None if last.open_block == NOT_OPEN else Label(last.open_block)
        try:
            rendered = render_appended(
                self._chat,
                messages,
                start,
                tools,
                kwargs,
                Options(constrained=constrained),
                last_id=last.ids[-1],
                open_block=block,
            )
        except (TemplateError, MessageError, AppendError) as error:
            raise PromptError(str(error)) from error
        return _prompt(rendered)

    def label_output(self, prompt: Prompt, ids: Sequence[int]) -> Output:
        """Labels of the tokens sampled after `prompt`: the same tables that the engine steps."""
        automaton = self._chat.automaton(prompt.family)
        labels, state = automaton.run(automaton.initial[prompt.initial], ids)
        open_block = automaton.is_open(state)
        return Output(flatten_runs(runs_of(labels)), NOT_OPEN if open_block is None else int(open_block))

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone; a part of a character shows as U+FFFD."""
        known = self._token_bytes
        return [known[i].decode("utf-8", "replace") if i < len(known) else "" for i in ids]

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return self._chat.vocabulary.token_bytes()


def _prompt(rendered: Rendered) -> Prompt:
    return Prompt(array("i", rendered.tokens.tobytes()), flatten_runs(rendered.runs), rendered.family, rendered.initial)
