"""`agentkv label FILE`: the phase of every token of a transcript."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from .chat_format import ChatFormat
from .families import UnknownFamilyError
from .formats.chat import MessageError
from .formats.dialects import DIALECTS
from .formats.files import Transcript, TranscriptError, read_transcripts
from .labels import fold_table
from .render import Options, Rendered, render_prompt
from .show import as_html, as_json, as_terminal
from .template import TemplateError
from .vocabulary import TokenizerError

Format = Literal["auto", "openai", "responses", "anthropic", "harmony", "react"]
DialectName = Literal["react", "command", "fenced"]
SayPhase = Literal["others", "act", "think"]
ToolsTemplate = Literal["auto", "own", "model"]

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def label(
    file: Annotated[Path, typer.Argument(help="Transcript: JSON, JSON lines, harmony or ReAct text.", exists=True)],
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder; default: the default model.")] = None,
    template: Annotated[Path | None, typer.Option(help="Chat template (Jinja) instead of the folder's.")] = None,
    family: Annotated[str | None, typer.Option(help="Model family instead of the detected one.")] = None,
    tools_template: Annotated[ToolsTemplate, typer.Option(help="Which template serves tools.")] = "auto",
    format: Annotated[Format, typer.Option(help="Format of the file.")] = "auto",
    dialect: Annotated[DialectName | None, typer.Option(help="How the agent acts in plain text.")] = None,
    say: Annotated[SayPhase, typer.Option(help="Phase that visible text counts as.")] = "others",
    item: Annotated[int | None, typer.Option(help="Only this conversation of the file, from 0.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page here.")] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object per conversation.")] = False,
    text: Annotated[bool, typer.Option(help="Print the coloured text, not only the counts.")] = True,
) -> None:
    """Show the phase of every token of a transcript, and how many tokens each phase has."""
    console = Console()
    try:
        chat = ChatFormat.from_folder(
            tokenizer or _default_model(),
            template=template.read_text("utf-8") if template else None,
            family=family,
            tools_template=tools_template,
        )
        found = read_transcripts(file, format)
        found = found if item is None else found[item : item + 1]
        table = fold_table(say)
        pages: list[str] = []
        for transcript in found:
            rendered = _render(chat, transcript, dialect or ("react" if format == "react" else None))
            if as_json_:
                print(json.dumps(as_json(transcript.name, rendered, table)))
            else:
                console.print(as_terminal(transcript.name, chat, rendered, table, text))
            if html:
                pages.append(as_html(transcript.name, chat, rendered, table))
    except (TranscriptError, TokenizerError, TemplateError, MessageError, UnknownFamilyError) as error:
        Console(stderr=True).print(f"agentkv label: {error}", markup=False)
        raise typer.Exit(1) from error
    if html:
        html.write_text("".join(pages), "utf-8")


def _render(chat: ChatFormat, transcript: Transcript, dialect: str | None) -> Rendered:
    options = Options(dialect=DIALECTS[dialect] if dialect else None, add_generation_prompt=False)
    return render_prompt(chat, transcript.messages, transcript.tools, options=options)


def _default_model() -> Path:
    from agentkv_serve.model import default_model

    return default_model()
