"""A labelled prompt for the eye: coloured text in the terminal or as HTML, and as JSON."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .chat_format import ChatFormat
from .labels import Label, Phase, count_labels
from .render import Rendered

STYLES: dict[Label, str] = {
    Label.INPUT: "default",
    Label.THINK: "magenta",
    Label.ACT: "green",
    Label.TOOL: "yellow",
    Label.SAY: "cyan",
    Label.GLUE: "bright_black",
}
_COLOURS: dict[Label, str] = {
    Label.INPUT: "#24292f",
    Label.THINK: "#8250df",
    Label.ACT: "#1a7f37",
    Label.TOOL: "#9a6700",
    Label.SAY: "#0550ae",
    Label.GLUE: "#8c959f",
}


def pieces(chat: ChatFormat, rendered: Rendered) -> list[tuple[Label, str]]:
    """The prompt's text, one piece per run."""
    ids, first = rendered.ids, rendered.runs[0][0] if rendered.runs else 0
    return [(label, chat.vocabulary.decode(ids[begin - first : end - first])) for begin, end, label in rendered.runs]


def counts(rendered: Rendered, table: Mapping[Label, Phase]) -> dict[str, dict[str, int]]:
    """Tokens per label and per phase."""
    labels = count_labels(rendered.runs)
    phases = dict.fromkeys(Phase, 0)
    for label, number in labels.items():
        phases[table[label]] += number
    return {
        "labels": {label.name.lower(): number for label, number in labels.items()},
        "phases": {phase.name.lower(): number for phase, number in phases.items()},
    }


def facts(rendered: Rendered) -> dict[str, Any]:
    """What is known about the rendering itself."""
    return {
        "tokens": len(rendered.tokens),
        "family": rendered.family,
        "confidence": rendered.confidence,
        "initial": rendered.initial,
        "dropped": [list(place) for place in rendered.dropped],
        "unknown_parts": rendered.unknown_parts,
        "control_tokens": rendered.control_tokens,
    }


def as_json(name: str, rendered: Rendered, table: Mapping[Label, Phase]) -> dict[str, Any]:
    """Runs, counts and facts as one object."""
    runs = [[begin, end, label.name.lower()] for begin, end, label in rendered.runs]
    return {"name": name, **facts(rendered), **counts(rendered, table), "runs": runs}


def as_terminal(
    name: str, chat: ChatFormat, rendered: Rendered, table: Mapping[Label, Phase], text: bool
) -> RenderableType:
    """The coloured text (unless `text` is False), then the counts."""
    shown: list[RenderableType] = []
    if text:
        body = Text(no_wrap=False)
        for label, piece in pieces(chat, rendered):
            body.append(piece, style=STYLES[label])
        shown += [body, Text()]
    return Group(*shown, _counts_table(name, rendered, table), _facts_line(rendered))


def _counts_table(name: str, rendered: Rendered, table: Mapping[Label, Phase]) -> Table:
    found, total = counts(rendered, table), max(len(rendered.tokens), 1)
    shown = Table("label", "phase", "tokens", "share", title=name, title_justify="left")
    for label in Label:
        number = found["labels"][label.name.lower()]
        phase = table[label].name.lower()
        shown.add_row(Text(label.name.lower(), STYLES[label]), phase, str(number), f"{number / total:.1%}")
    shown.add_section()
    for phase_name, number in found["phases"].items():
        shown.add_row("", phase_name, str(number), f"{number / total:.1%}")
    return shown


def _facts_line(rendered: Rendered) -> Text:
    known = facts(rendered)
    dropped = ", ".join(f"messages[{index}] {part}" for index, part in rendered.dropped)
    line = f"{known['tokens']} tokens, family {known['family']}, confidence {known['confidence']}"
    line += f", decode starts in {known['initial']}"
    line += f"\nnot shown by the template: {dropped}" if dropped else ""
    if rendered.control_tokens:
        line += f"\n{rendered.control_tokens} control tokens are spelled inside user or tool text"
    return Text(line + (f"\n{rendered.unknown_parts} unknown parts" if rendered.unknown_parts else ""))


def as_html(name: str, chat: ChatFormat, rendered: Rendered, table: Mapping[Label, Phase]) -> str:
    """A page of its own, without scripts: legend with counts, then the text."""
    found, total = counts(rendered, table), max(len(rendered.tokens), 1)
    rules = "".join(f".{label.name.lower()}{{color:{colour}}}" for label, colour in _COLOURS.items())
    rows = "".join(
        f'<tr><td class="{key}">{key}</td><td>{table[Label[key.upper()]].name.lower()}</td>'
        f"<td>{number}</td><td>{number / total:.1%}</td></tr>"
        for key, number in found["labels"].items()
    )
    body = "".join(
        f'<span class="{label.name.lower()}" title="{label.name.lower()}">{html.escape(piece)}</span>'
        for label, piece in pieces(chat, rendered)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(name)}</title><style>'
        "body{font:14px/1.5 system-ui;margin:2rem;max-width:70rem}td{padding-right:1.5rem}"
        f"pre{{white-space:pre-wrap;overflow-wrap:anywhere}}{rules}</style>"
        f"<h1>{html.escape(name)}</h1><table><tr><th>label<th>phase<th>tokens<th>share</tr>{rows}</table>"
        f"<pre>{body}</pre></html>\n"
    )
