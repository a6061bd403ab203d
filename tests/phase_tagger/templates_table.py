"""What every real chat template does to a session: the table in docs/results/templates.md.

python -m tests.phase_tagger.templates_table
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from agentkv_serve.phase_tagger import Family, TemplateError, detect_family, read_messages
from agentkv_serve.phase_tagger.families import PLAIN
from agentkv_serve.phase_tagger.printer import Printed, Printer
from agentkv_serve.phase_tagger.regions import Regions
from agentkv_serve.phase_tagger.template import ChatTemplate

from .invariants import faults
from .packages import templates
from .transcripts import HERE, Transcript, load, names

TABLE = Path(__file__).parents[2] / "docs" / "results" / "templates.md"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@dataclass
class Row:
    """One template against all transcripts."""

    name: str
    family: Family
    drift: str
    verified: int = 0
    unverified: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    injected: list[str] = field(default_factory=list)


def transcripts() -> list[Transcript]:
    """Every transcript of the repository."""
    return [transcript for name in names() if (HERE / name).is_file() for transcript in load(name)]


def print_transcript(template: ChatTemplate, family: Family, transcript: Transcript) -> Printed:
    conversation = read_messages(transcript.messages, family=family, dialect=transcript.dialect)
    return Printer(template, conversation, transcript.tools).print()


def measure(name: str, source: str, runs: list[Transcript]) -> Row:
    """Render every transcript through the template, verify, and look at the labels."""
    template, family = ChatTemplate(source, TOKENS), detect_family(None, source)
    row = Row(name, family, drift_class(template, family))
    base: list[int] | None = None
    for transcript in runs:
        try:
            printed = print_transcript(template, family, transcript)
        except TemplateError as error:
            row.refused[str(error).splitlines()[0]] += 1
            continue
        if printed.confidence != "high":
            row.unverified.append(transcript.name)
            continue
        row.verified += 1
        roles = [message["role"] for message in transcript.messages]
        row.dropped.update(f"{roles[index]} {part}" for index, part in printed.dropped)
        regions = Regions(printed.text, printed.fields, family)
        row.faults += [f"{transcript.name}: {fault}" for fault in faults(printed, regions)]
        order = [label for label, _ in groupby(regions.labels.tolist())]
        if transcript.name.startswith("05_"):
            base = order
        elif transcript.name.startswith("19_") and base is not None and order != base:
            row.injected.append(transcript.name)
    return row


def drift_class(template: ChatTemplate, family: Family) -> str:
    """A: append-only. B: the next user message changes the past. C: every assistant turn does. D: the head moves.

    "-" when the template refuses the scenario (a call, its result, an answer, a second question).
    """
    for thinking in (True, False):
        try:
            texts = [_print(template, _SCENARIO[:count], thinking) for count in range(2, len(_SCENARIO) + 1)]
        except TemplateError:
            continue
        if thinking and _THOUGHT not in texts[1] and "</think>" not in template.source:
            continue  # the template knows no thinking at all
        kept = [later.startswith(earlier) for earlier, later in pairwise(texts)]
        thought = [not thinking or _THOUGHT in text for text in texts[1:]]
        if _common(texts[-2], texts[-1]) < texts[-1].find("First question"):
            return "D"
        if not all(kept[:2]) or not all(thought[:2]) or (not kept[2] and thought[2]):
            return "C"
        return "A" if all(kept) and all(thought) else "B"
    return "-"


_THOUGHT = "I wonder about it"
_SCENARIO: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "First question"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": _THOUGHT,
        "tool_calls": [
            {"id": "callabc12", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "callabc12", "content": "a result"},
    {"role": "assistant", "content": "An answer", "reasoning_content": "Now I know"},
    {"role": "user", "content": "Second question"},
]
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look at it", "parameters": {"type": "object", "properties": {}}},
    }
]


_THINKING = {"enable_thinking": True, "thinking": True}


def _print(template: ChatTemplate, messages: list[dict[str, Any]], thinking: bool) -> str:
    given = [{k: v for k, v in m.items() if thinking or k != "reasoning_content"} for m in messages]
    return Printer(template, read_messages(given), _TOOLS, _THINKING, add_generation_prompt=False).print().text


def _common(left: str, right: str) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def rows() -> list[Row]:
    runs = transcripts()
    return [measure(name, source, runs) for name, source in sorted(templates().items())]


def table(found: list[Row], count: int) -> str:
    """The document."""
    lines = [
        "# Chat templates and what they do to a session",
        "",
        f"{len(found)} chat templates, taken from the llama-cpp-python 0.3.36 source archive and the trl 1.16.0 wheel,",
        f"each printed with {count} recorded transcripts. Made by `python -m tests.phase_tagger.templates_table`.",
        "",
        "- **drift**: A append-only; B the next user message changes earlier turns (old thinking goes); C every",
        "  assistant turn changes what stands before it; D something near the head moves with each user message;",
        "  `-` the template refuses tools. Measured with a call, its result, an answer and a second question.",
        "- **verified**: renderings whose places were verified against the plain rendering / not verified / refused by",
        "  the template itself.",
        "- **dropped**: parts of messages that the template leaves out in at least one transcript.",
        "- **engine**: `served` = nothing in the family speaks against it (the engine checks the architecture at",
        "  start); else only labels exist, and why.",
        "",
        f"In all {sum(row.verified for row in found)} renderings verified, "
        f"{sum(len(row.unverified) for row in found)} not verified, "
        f"{sum(sum(row.refused.values()) for row in found)} refused by the templates.",
        "",
        "| template | family | drift | verified | dropped | engine |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        counts = f"{row.verified} / {len(row.unverified)} / {sum(row.refused.values())}"
        engine = f"labels only: {row.family.unserved}" if row.family.unserved else "served"
        if row.family is PLAIN:
            engine = "family unknown: labels by structure; the engine decides by the architecture"
        dropped = ", ".join(sorted(row.dropped)) or "-"
        lines.append(f"| {row.name} | {row.family.name} | {row.drift} | {counts} | {dropped} | {engine} |")
    refusals = Counter(reason for row in found for reason in row.refused)
    lines += ["", "Refusals, by the number of templates that say so:", ""]
    lines += [f"- {number}: {reason}" for reason, number in refusals.most_common()]
    return "\n".join(lines) + "\n"


def main() -> None:
    found = rows()
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(table(found, len(transcripts())), "utf-8")
    print(f"{TABLE}: {len(found)} templates")
    for row in found:
        for problem in (*row.unverified, *row.faults, *row.injected):
            print(f"{row.name}: {problem}")


if __name__ == "__main__":
    main()
