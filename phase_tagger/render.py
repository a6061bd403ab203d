"""From chat messages to token ids with a label each: the whole prompt, or only what was appended to a ledger."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from .chat_format import ChatFormat
from .families.family import Family
from .formats.chat import Conversation, Dialect, JsonObject, Message, Segment, read_messages
from .labels import Label, Run, extend_runs, shift_runs
from .printer import Confidence, Printed, Printer
from .regions import CharRuns, Regions
from .skeleton import Window, shape_of
from .template import TemplateError

_LEDGER = -3  # message index of the assistant turn that the ledger holds already
_QUESTION = -2  # message index of the question that stands for everything before it


class AppendError(ValueError):
    """The messages cannot be appended to a ledger: no assistant turn stands before them."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where one string of a message stands: tokens `[start, end)`, in positions like those of the runs."""

    message: int
    part: str
    label: Label
    start: int
    end: int


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt, or the appended end of one.

    tokens: int32 `[n]`. runs: cover `[offset, offset + n)`. initial: the decode automaton's initial state by name.
    family: name of the family that the automaton must be built for. confidence: "high" = places verified against
    the plain rendering; "medium" = strings found by search; "low" = all input. dropped: (message index, part)
    that the template did not print. unknown_parts: parts of messages that nobody knows. control_tokens: control
    tokens spelled inside user, system or tool text. parts: where every string stands.
    """

    tokens: npt.NDArray[np.int32]
    runs: list[Run]
    initial: str
    family: str
    confidence: Confidence = "high"
    dropped: tuple[tuple[int, str], ...] = ()
    unknown_parts: int = 0
    control_tokens: int = 0
    parts: tuple[Part, ...] = field(default=(), repr=False)

    @property
    def ids(self) -> list[int]:
        """The token ids as a plain list."""
        ids: list[int] = self.tokens.tolist()
        return ids


@dataclass(frozen=True)
class Options:
    """How messages are read and printed.

    dialect, think_tools: as in `read_messages`. sanitize: break control tokens inside user, system and tool text
    with a zero-width space, so that the engine reads them as text. constrained: the sampler forces a tool call.
    continue_final: the last assistant message is a beginning that the model goes on with. now: date for templates.
    """

    dialect: Dialect | None = None
    think_tools: Sequence[str] = ()
    sanitize: bool = False
    constrained: bool = False
    continue_final: bool = False
    add_generation_prompt: bool = True
    now: datetime | None = None


DEFAULT = Options()


def render_prompt(
    chat: ChatFormat,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[JsonObject] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT,
) -> Rendered:
    """Render the whole prompt and label every token of it.

    Raises `TemplateError` when the template refuses the messages, `MessageError` when they are none.
    """
    conversation = _read(chat, messages, options)
    family, printed = _print(chat, conversation, tools, template_kwargs, options)
    regions = Regions(printed.text, printed.fields, family)
    end = len(printed.text)
    if options.continue_final and conversation.messages and conversation.messages[-1].role == "assistant":
        end = regions.spans[-1].end if regions.spans else end
    unknown = conversation.unknown_parts
    del conversation  # many small objects, not needed while the text is tokenised
    return _finish(chat, _window(printed, regions, 0, end, 0), options, 0, unknown, bool(tools))


def render_appended(
    chat: ChatFormat,
    messages: Sequence[Mapping[str, Any]],
    start: int,
    tools: Sequence[JsonObject] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    options: Options = DEFAULT,
    *,
    last_id: int | None = None,
    open_block: Label | None = None,
    offset: int = 0,
) -> Rendered:
    """Render only `messages[start:]`, to be appended to a ledger that ends with the turn of `messages[start - 1]`.

    The cost is that of the new messages alone. The segment starts at the end marker of the assistant's turn, which
    is left out when the ledger holds it already (`last_id` is the ledger's last id), so that no token merges
    across the seam. `open_block`: THINK when the turn was cut while thinking; the segment then closes it first.
    `offset`: length of the ledger, added to the runs. Raises as `render_prompt`, and `AppendError`.
    """
    if not 0 < start <= len(messages) or messages[start - 1].get("role") not in ("assistant", "model"):
        raise AppendError(f"messages[{start - 1}] must be the assistant turn that the ledger ends with")
    read = _read(chat, messages[start - 1 :], options, start - 1)
    turn, *new = read.messages
    unknown = read.unknown_parts and _read(chat, messages[start:], options).unknown_parts
    leading = _read(chat, list(_leading(messages[: start - 1])), options).messages
    own = chat.uses_own(tools, Conversation([turn, *new]))
    plain = replace(options, constrained=False) == DEFAULT
    shape = shape_of(leading, turn, new, tools, template_kwargs) if plain else None
    # Switches in the system text count for every turn. But templates that print the system text or the tools before
    # the last user message (class D) would print them again: the ledger has them already.
    question = Message(_QUESTION, "user", [Segment("go on", Label.INPUT, _QUESTION, "content")])
    heads = (([*leading, question], tools), ([question], None))

    def printer(head: int) -> tuple[Family, Printer]:
        past, shown = heads[head]
        short = Conversation([*past, _shortened(turn), *new])
        return _printer(chat, short, shown, template_kwargs, options, own)

    known = chat.skeletons.get(shape)
    window = known.fit(printer(known.head)[1].plain(), new) if known else None
    if window is None:
        for head in range(len(heads)):
            family, full = printer(head)
            printed = full.print()
            regions = Regions(printed.text, printed.fields, family)
            cut = _ledger_end(regions)
            after = {f.segment.message for f in printed.fields if f.start >= cut}
            if min(after - {_LEDGER}, default=start) >= start:
                break
        window = _window(printed, regions, cut, len(printed.text), start)
        chat.skeletons.learn(shape, head, cut, window, new)
    rendered = _finish(chat, window, options, offset, unknown, bool(tools))
    return _join(chat, window.family, rendered, last_id, open_block, offset)


def _leading(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return takewhile(lambda message: message.get("role") in ("system", "developer"), messages)


def _ledger_end(regions: Regions) -> int:
    """Where the assistant turn that the ledger holds ends in a rendered text."""
    ends = [span.end for span in regions.spans if span.message == _LEDGER]
    if not ends:
        raise TemplateError("the chat template does not print the assistant's turn")
    cut = regions.turn_end_after(ends[-1])
    return cut if cut >= 0 else ends[-1]


def _read(chat: ChatFormat, messages: Sequence[Mapping[str, Any]], options: Options, first: int = 0) -> Conversation:
    return read_messages(
        messages, family=chat.family, dialect=options.dialect, think_tools=options.think_tools, first=first
    )


def _shortened(turn: Message) -> Message:
    """The assistant turn that the ledger holds, as short as a template may need it."""
    if not turn.calls:
        return Message(_LEDGER, "assistant", [Segment("done", Label.SAY, _LEDGER, "content")])
    calls = [replace(call, name=replace(call.name, message=_LEDGER), arguments={}) for call in turn.calls]
    return Message(_LEDGER, "assistant", calls=calls)


def _print(
    chat: ChatFormat,
    conversation: Conversation,
    tools: Sequence[JsonObject] | None,
    arguments: Mapping[str, Any] | None,
    options: Options,
) -> tuple[Family, Printed]:
    family, printer = _printer(chat, conversation, tools, arguments, options)
    return family, printer.print()


def _printer(
    chat: ChatFormat,
    conversation: Conversation,
    tools: Sequence[JsonObject] | None,
    arguments: Mapping[str, Any] | None,
    options: Options,
    own: bool | None = None,
) -> tuple[Family, Printer]:
    appended = own is not None
    own = chat.uses_own(tools, conversation) if own is None else own
    template, family = chat.template_for(own)
    return family, Printer(
        template,
        conversation,
        tools,
        arguments,
        escape=chat.vocabulary.control if options.sanitize else None,
        add_generation_prompt=options.add_generation_prompt and not options.continue_final,
        now=options.now,
        names_only=appended,
    )


def _window(printed: Printed, regions: Regions, begin: int, end: int, first: int) -> Window:
    """The characters `[begin, end)` of a printed text with their labels; lets go of all that is as large as the text.
    `first`: index of the first message that counts."""
    if printed.confidence == "low":
        regions.labels[:] = Label.INPUT
    shown = [f for f in printed.fields if f.start >= begin and f.segment.part not in ("argument", "schema")]
    window = Window(
        printed.text[begin:end],
        CharRuns.of(regions.labels[begin:end]),
        [replace(f, start=f.start - begin, end=f.end - begin) for f in shown] if begin else shown,
        regions.initial,
        regions.family,
        printed.confidence,
        tuple(place for place in printed.dropped if place[0] >= first),
    )
    printed.text, printed.fields = "", []
    regions.release()
    return window


def _finish(
    chat: ChatFormat, window: Window, options: Options, offset: int, unknown_parts: int, calls: bool
) -> Rendered:
    """Tokenise a window and carry the labels over to the tokens."""
    fields, family = window.fields, window.family
    edges = np.array([(f.start, f.end) for f in fields], np.int64).reshape(-1)
    text, window.text = window.text, ""
    tokens, runs, places = _tokenise(chat, text, window.characters, edges, offset)
    del text  # from here on nothing as large as the text but the ids
    initial = window.initial
    if options.constrained and initial != "think":
        initial = "act"
    elif initial == "start" and family.bare_call and not calls:
        initial = "say"  # without tools a leading brace is no call
    if options.continue_final:
        initial = {Label.THINK: "think", Label.ACT: "act"}.get(runs[-1][2], "say") if runs else "start"
    parts = tuple(
        Part(f.segment.message, f.segment.part, Label(f.segment.label or 0), offset + first, offset + last)
        for f, (first, last) in zip(fields, places.reshape(-1, 2).tolist(), strict=True)
    )
    added = chat.vocabulary.is_added
    given = [part for part in parts if part.label in (Label.INPUT, Label.TOOL)]
    return Rendered(
        tokens,
        runs,
        initial,
        family.name,
        window.confidence,
        window.dropped,
        unknown_parts,
        sum(int(added[tokens[part.start - offset : part.end - offset]].sum()) for part in given),
        parts,
    )


def _tokenise(
    chat: ChatFormat, text: str, characters: CharRuns, edges: npt.NDArray[np.int64], offset: int
) -> tuple[npt.NDArray[np.int32], list[Run], npt.NDArray[np.int64]]:
    """Ids `[n]` and runs of the text, and the first token at or after each character of `edges`."""
    ids = array("i")  # grows in place: nothing as long as the text is held twice
    runs: list[Run] = []
    places = np.zeros(len(edges), np.int64)
    for numbers, starts, end in chat.vocabulary.pieces(text):
        if len(numbers):
            extend_runs(runs, shift_runs(characters.tokens(starts, end), offset + len(ids)))
            places += np.searchsorted(starts, edges)
            ids.frombytes(numbers.tobytes())
    return np.frombuffer(ids, np.int32), runs, places


def _join(
    chat: ChatFormat,
    family: Family,
    rendered: Rendered,
    last_id: int | None,
    open_block: Label | None,
    offset: int,
) -> Rendered:
    """Drop the turn end that the ledger has already, or close what was left open."""
    tokens, runs = rendered.tokens, rendered.runs
    shift = 0
    if len(tokens) and last_id is not None and chat.ends_turn(last_id, int(tokens[0])):
        tokens, shift = tokens[1:], -1
        moved = [(max(begin - 1, offset), end - 1, label) for begin, end, label in runs]
        runs = [run for run in moved if run[1] > run[0]]
    elif open_block is Label.THINK and family.think and family.think[0].close:
        close = chat.vocabulary.encode(family.think[0].close)[0]
        tokens, shift = np.concatenate([close, tokens]), len(close)
        runs = extend_runs([(offset, offset + shift, Label.GLUE)], shift_runs(runs, shift))
    parts = tuple(replace(part, start=part.start + shift, end=part.end + shift) for part in rendered.parts)
    return replace(rendered, tokens=tokens, runs=runs, parts=parts)
