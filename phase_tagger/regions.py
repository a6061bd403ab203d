"""From fields in a rendered prompt to a label for every character, and from there to tokens.

Only the text between fields is looked at for the family's markers: it holds nothing that a user, a tool or the model
wrote, so a marker inside a message never changes a label.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .families.family import Family
from .labels import Label, Run
from .sentinels import Field

# What control tokens look like, for templates of no known family.
_CONTROL = re.compile(r"<[|｜][^<>\n]{1,48}[|｜]>|</?[A-Za-z][\w:]*>|\[/?[A-Z_]+\]")
_STRETCH = 1 << 14
CharLabels = npt.NDArray[np.int8]


@dataclass(slots=True)
class Span:
    """Neighbouring fields that form one region: a text, a result, all calls of a message, the tool schemas."""

    label: Label
    start: int
    end: int
    message: int
    part: str


class Regions:
    """Labels the characters of one rendered prompt; `labels` int8 `[characters]`, `initial` for decoding."""

    def __init__(self, text: str, fields: list[Field], family: Family) -> None:
        self.text = text
        self.family = family
        self.labels: CharLabels = np.full(len(text), Label.GLUE, np.int8)
        self._starts = _either(family.turn_start)
        self._ends = _either(family.turn_end)
        opens = _either(tuple(block.open for block in family.think)).pattern
        closes = _either(tuple(block.close for block in family.think if block.close)).pattern
        self._think_open, self._think_close = re.compile(rf"(?:{opens})\s*\Z"), re.compile(rf"\s*(?:{closes})")
        self._known = bool(family.turn_start or family.turn_end)
        self.spans = self._merge(fields)
        for span in self.spans:
            self._paint(span.start, span.end, span.label)
        for index in range(len(self.spans) + 1):
            previous = self.spans[index - 1] if index else None
            following = self.spans[index] if index < len(self.spans) else None
            self._gap(previous, following)
        self.initial = self._initial()

    def release(self) -> None:
        """Let go of the text and all that is as large."""
        self.text, self.spans, self.labels = "", [], np.zeros(0, np.int8)

    def turn_end_after(self, position: int) -> int:
        """Where the turn that holds `position` ends: its end marker, or the next turn's start; -1 if neither."""
        found = [match.start() for p in (self._starts, self._ends) if (match := p.search(self.text, position))]
        return min(found, default=-1)

    def _merge(self, fields: list[Field]) -> list[Span]:
        spans: list[Span] = []
        names: set[int] = set()
        for field in fields:
            segment = field.segment
            assert segment.label is not None
            if segment.part == "call":
                if field.number in names:
                    continue  # the template repeats the name, such as in the header of the result
                names.add(field.number)
            part = "call" if segment.part == "argument" else segment.part
            joined = part in ("call", "schema")
            last = spans[-1] if spans else None
            if last and joined and last.part == part and last.message == segment.message:
                last.end = max(last.end, field.end)
            elif last is None or field.start >= last.end:
                spans.append(Span(segment.label, field.start, field.end, segment.message, part))
        if self.family.channels:
            self._channel_bodies(spans)
        return spans

    def _channel_bodies(self, spans: list[Span]) -> None:
        """A call's body follows its header, which names the function."""
        for span in spans:
            if span.part == "call":
                body = self.text.find("<|message|>", span.start)
                if body >= 0:
                    span.start = min(body + len("<|message|>"), len(self.text))
                    span.end = max(span.end, self.turn_end_after(span.start), span.start)

    def _gap(self, previous: Span | None, following: Span | None) -> None:
        a = previous.end if previous else 0
        b = following.start if following else len(self.text)
        if b <= a:
            return
        starts = [match.start() for match in self._starts.finditer(self.text, a, b)]
        if not starts:  # both stand in one turn
            rest = self._after(previous, a, b) if previous else a
            if following:
                self._before(following, rest, b, previous)
            return
        if previous:
            self._after(previous, a, starts[0])
        else:
            self._free_text(a, starts[0])
        for start, end in pairwise(starts):
            self._free_text(self._header(start, end), end)
        if following:
            self._before(following, starts[-1], b, None)

    def _after(self, span: Span, a: int, b: int) -> int:
        """Label what closes `span` in `[a, b)`; returns where the rest begins."""
        stop = self._ends.search(self.text, a, b)
        end = stop.start() if stop else b
        rest = a
        if span.label is Label.THINK and span.part != "call":
            match = self._think_close.match(self.text, a, end)
            rest = match.end() if match else a
        elif span.part == "call" or span.label is Label.ACT:
            if not self.family.channels:
                closes = [at for block in self.family.act if (at := _last_end(self.text, block.close, a, end)) >= 0]
                control = None if self._known else _CONTROL.search(self.text, a, end)
                shown = self.text[a : control.start() if control else end].rstrip()
                rest = max(closes, default=a + len(shown))
        elif span.label is Label.TOOL:
            opener = min((at for at in self._tool_openers(a, end)), default=end)
            rest = max((_last_end(self.text, block.close, a, opener) for block in self.family.tool), default=a)
            rest = max(rest, a)
        elif span.label is Label.INPUT:
            self._free_text(a, end, after=True)
            return b if stop else a
        self._paint(a, rest, span.label)
        return rest

    def _before(self, span: Span, a: int, b: int, previous: Span | None) -> None:
        """Label what opens `span` in `[a, b)`; `previous` is the span before it in the same turn."""
        begin = b
        same = previous is not None and previous.message == span.message
        header = self._header(a, b) if previous is None else a
        if span.label is Label.THINK and span.part != "call":
            match = self._think_open.search(self.text[a:b])
            begin = a + match.start() if match else b
        elif span.part == "call" or span.label is Label.ACT:
            if not self.family.channels:
                markers = (*(block.open for block in self.family.act), *self.family.call)
                opened = [at for opener in markers if (at := self.text.find(opener, a, b)) >= 0]
                controls = [] if self._known else [m.end() for m in _CONTROL.finditer(self.text, a, b)]
                begin = min(opened, default=_skip_space(self.text, max([header, *controls]), b))
        elif span.label is Label.TOOL:
            begin = min(self._tool_openers(a, b), default=b)
        elif span.label is Label.INPUT:
            self._free_text(header, b, before=True)
            return
        if same and not self.text[a:begin].strip():
            begin = a  # whitespace inside a turn belongs to what follows it
        self._paint(begin, b, span.label)

    def _tool_openers(self, a: int, b: int) -> list[int]:
        return [at for block in self.family.tool if (at := self.text.find(block.open, a, b)) >= 0]

    def _header(self, start: int, end: int) -> int:
        """Where the text of the turn that opens at `start` begins."""
        match = self._starts.match(self.text, start, end)
        if match is None:
            return start
        opened, closed = self.family.header
        if opened == match[0] and closed:
            at = self.text.find(closed, match.end(), end)
            return end if at < 0 else at + len(closed)
        return match.end()

    def _free_text(self, a: int, b: int, *, after: bool = False, before: bool = False) -> None:
        """Text of the template itself: input from its first to its last visible character, turn end excluded.

        `after` / `before`: a field of the same turn stands there, and the whitespace between is one with it.
        """
        stop = self._ends.search(self.text, a, b)
        b, before = (stop.start(), False) if stop else (b, before)
        text = self.text[a:b]
        if text.strip():
            begin = a if after else a + len(text) - len(text.lstrip())
            self._paint(begin, b if before else a + len(text.rstrip()), Label.INPUT)

    def _paint(self, start: int, end: int, label: Label) -> None:
        self.labels[start:end] = label

    def _initial(self) -> str:
        """What the generation prompt leaves open: a think block, a closed one, or nothing."""
        tail = self.text[self.spans[-1].end if self.spans else 0 :]
        for match in list(self._starts.finditer(tail))[-1:]:
            tail = tail[match.start() :]
        for block in self.family.think:
            opened = tail.rfind(block.open)
            if opened >= 0:
                return "say" if block.close and block.close in tail[opened:] else "think"
            if block.close and tail.rstrip().endswith(block.close):
                return "say"
        return "start"


@dataclass(frozen=True, slots=True)
class CharRuns:
    """Labels of characters as runs: run i has `labels[i]` from character `starts[i]` on."""

    starts: npt.NDArray[np.int64]
    labels: CharLabels

    @classmethod
    def of(cls, labels: CharLabels) -> CharRuns:
        """Runs of an array of labels, looked at in stretches to keep the temporary arrays small."""
        edges = [np.zeros(min(len(labels), 1), np.int64)]
        for begin in range(1, len(labels), _STRETCH):
            now, before = labels[begin : begin + _STRETCH], labels[begin - 1 : begin + _STRETCH - 1]
            edges.append(np.flatnonzero(now != before[: len(now)]) + begin)
        starts = np.concatenate(edges)
        return cls(starts, labels[starts])

    def tokens(self, starts: npt.NDArray[np.int32], end: int) -> list[Run]:
        """Runs of tokens that start at the characters `starts` int32 `[n]`, n > 0, the last up to `end`.

        A token takes the label of the first character that it covers and that is not glue; the pieces of one
        character share its label.
        """
        first, last = np.searchsorted(self.starts, (starts[0], end - 1), "right").tolist()
        begins = self.starts[first:last]
        firsts = np.searchsorted(starts, begins).tolist()
        labels = self.labels[first - 1 : last].tolist()
        count = len(starts)
        found: list[tuple[int, int]] = [(0, labels[0])]  # first token and label of each run
        for begin, after, label in zip(begins.tolist(), firsts, labels[1:], strict=True):
            at = after
            if label != Label.GLUE and not (after < count and starts[after] == begin):
                before = next(known for token, known in reversed(found) if token < after)
                if before == Label.GLUE:  # a token that begins in glue and reaches into this run belongs to it
                    at = int(np.searchsorted(starts, starts[after - 1]))
            while found and found[-1][0] >= at:
                found.pop()
            if at < count and not (found and found[-1][1] == label):
                found.append((at, label))
        edges = [*(token for token, _ in found[1:]), count]
        return [(token, edge, Label(label)) for (token, label), edge in zip(found, edges, strict=True)]


def _either(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _last_end(text: str, marker: str | None, a: int, b: int) -> int:
    at = text.rfind(marker, a, b) if marker else -1
    return at if at < 0 else at + len(marker or "")


def _skip_space(text: str, a: int, b: int) -> int:
    return b - len(text[a:b].lstrip())
