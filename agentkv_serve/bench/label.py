"""`agentkv bench label`: time and memory of rendering and labelling prompts, on one core."""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from agentkv_serve.bench.report import machine, publish, spread
from agentkv_serve.phase_tagger import ChatFormat, render_appended, render_prompt

TARGETS = {"whole_100k_tokens_s": 1.0, "appended_1k_tokens_ms": 10.0, "memory_over_text": 3.0}
_WORDS = (
    "The traveller would like to change the reservation, so the agent looks for another flight on the same day, "
    "compares the prices of both cabins and explains which of them can be cancelled without a fee. "
)
_ROW = '{"flight": "HAT%03d", "seats": %d, "note": "' + _WORDS.strip() + '"}\n'


def label(
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder; default: the default model.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the whole transcript in tokens.")] = 100_000,
    appended: Annotated[int, typer.Option(help="Length of the appended message in tokens.")] = 1_000,
    repeats: Annotated[int, typer.Option(help="Runs of each measurement.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Label a whole transcript, and one appended message, on one core; time, memory and the targets."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if tokenizer is None:
        from agentkv_serve.model import default_model

        tokenizer = default_model()
    publish(measure(tokenizer, tokens, appended, repeats), "Labels of prompts", as_json)


def measure(tokenizer: Path, tokens: int, appended: int, repeats: int) -> dict[str, Any]:
    """All figures as one object: configuration, machine, times, memory."""
    began = time.perf_counter()
    chat = ChatFormat.from_folder(tokenizer)
    loaded = time.perf_counter() - began
    automaton = chat.automaton()
    built = time.perf_counter() - began - loaded
    messages = transcript(chat, tokens)
    whole = render_prompt(chat, messages, _TOOLS)
    text = len(chat.vocabulary.decode(whole.ids).encode())

    def render() -> None:
        render_prompt(chat, messages, _TOOLS)

    grown = [*messages, {"role": "tool", "tool_call_id": "last", "content": _words(chat, appended)}]
    last_id = chat.vocabulary.id_of(chat.family.turn_end[0]) if chat.family.turn_end else None
    added = render_appended(chat, grown, len(messages), _TOOLS, last_id=last_id)

    def append() -> None:
        render_appended(chat, grown, len(messages), _TOOLS, last_id=last_id)

    sampled = whole.ids[:10_000]

    def decode() -> None:
        automaton.run(automaton.initial["start"], sampled)

    return {
        "config": {
            "tokenizer": tokenizer.name,
            "family": chat.family.name,
            "messages": len(messages),
            "text_bytes": text,
            "whole_tokens": len(whole.ids),
            "appended_tokens": len(added.ids),
            "repeats": repeats,
        },
        "machine": machine(),
        "load_s": loaded,
        "automaton_s": built,
        "automaton_bytes": automaton.next.nbytes + automaton.label.nbytes,
        "whole_s": spread(_times(render, repeats)),
        "appended_ms": spread([1e3 * value for value in _times(append, repeats)]),
        "decode_us_per_token": spread([1e6 * value / len(sampled) for value in _times(decode, repeats)]),
        "memory": memory(render, text, whole.tokens.nbytes),
        "targets": TARGETS,
    }


def memory(work: Callable[[], None], text: int, held: int) -> dict[str, float]:
    """Bytes per byte of the prompt's text: what the ids hold, and the peak of all objects while labelling.

    The tokenizer's own arrays are not seen; they are as long as one piece of the text (2,048 characters). Python
    itself holds a text with CJK characters at 2 bytes and one with emoji at 4 bytes per character.
    """
    work()
    gc.collect()
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"ids": held / text, "peak": peak / text}


def transcript(chat: ChatFormat, tokens: int) -> list[dict[str, Any]]:
    """An agent's session of about that many tokens: thoughts, calls, JSON results of a thousand tokens, answers."""
    head = [{"role": "system", "content": _WORDS * 10}, {"role": "user", "content": "Find me a flight."}]
    loop = [_step(number) for number in range(2)]
    two = len(render_prompt(chat, [*head, *loop[0], *loop[1]], _TOOLS).tokens)
    one = len(render_prompt(chat, [*head, *loop[0]], _TOOLS).tokens)
    steps = max(1, 1 + round((tokens - one) / (two - one)))
    messages = [*head, *(message for number in range(steps) for message in _step(number))]
    return [*messages, _call("last", steps)]


def _step(number: int) -> list[dict[str, Any]]:
    rows = "".join(_ROW % (number % 1000, row) for row in range(20))
    return [
        _call(f"c{number}", number),
        {"role": "tool", "tool_call_id": f"c{number}", "content": rows},
        {"role": "assistant", "content": f"Option {number}: " + _WORDS * 3},
        {"role": "user", "content": f"And what else is there, number {number}?"},
    ]


def _call(identity: str, number: int) -> dict[str, Any]:
    function = {"name": "search", "arguments": {"origin": "JFK", "number": number}}
    call = {"id": identity, "type": "function", "function": function}
    return {"role": "assistant", "reasoning_content": _WORDS * 2, "content": "", "tool_calls": [call]}


_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search flights",
            "parameters": {"type": "object", "properties": {"origin": {"type": "string"}}},
        },
    }
]


def _words(chat: ChatFormat, tokens: int) -> str:
    each = len(chat.vocabulary.encode(_WORDS)[0])
    return _WORDS * max(1, tokens // each)


def _text(message: dict[str, Any]) -> str:
    return str(message.get("reasoning_content", "")) + str(message["content"])


def _times(work: Callable[[], None], repeats: int) -> list[float]:
    work()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found
