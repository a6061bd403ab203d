"""Prompts of sessions: token ids and labels, by the phase tagger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkv_serve.gateway.sessions.ledger import Runs, Turn
from agentkv_serve.phase_tagger import Label


class PromptError(ValueError):
    """Messages that the model's chat template refuses."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """New tokens of a request: `ids`, their flat `runs` from 0, and the decode automaton's initial state."""

    ids: list[int]
    runs: Runs
    initial: str


class Renderer:
    """The chat template, tokenizer and automaton of one model."""

    def __init__(self, tokenizer: Any) -> None:
        self._t = tokenizer
        self.family = "qwen3"
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    @classmethod
    def load(cls, folder: Path) -> Renderer:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(folder))

    def _render(self, messages: Any, tools: Any, kwargs: Any) -> str:
        try:
            return str(
                self._t.apply_chat_template(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **kwargs
                )
            )
        except Exception as error:
            raise PromptError(str(error)) from error

    def whole(self, messages: Sequence[Mapping[str, Any]], tools: Any, kwargs: Mapping[str, Any]) -> Prompt:
        ids = self._t.encode(self._render(messages, tools, kwargs), add_special_tokens=False)
        return Prompt(ids, [0, len(ids), int(Label.INPUT)], "start")

    def appended(
        self, messages: Sequence[Mapping[str, Any]], covered: int, tools: Any, kwargs: Mapping[str, Any], *, last: Turn
    ) -> Prompt:
        text = self._render(messages, tools, kwargs)
        n = sum(m["role"] == "assistant" for m in messages[:covered])
        i = 0
        for _ in range(n):
            i = text.index("<|im_start|>assistant", i) + 1
        i = text.index("<|im_end|>", i)
        if last.closed:
            i += len("<|im_end|>")
        ids = self._t.encode(text[i:], add_special_tokens=False)
        return Prompt(ids, [0, len(ids), int(Label.INPUT)], "start")

    def label_output(self, initial: str, ids: Sequence[int]) -> list[tuple[int, int, int]]:
        return [(0, len(ids), int(Label.SAY))]

    def ends_turn(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] == self._end
