"""The decode state machine of a family over bytes: what the automaton composes into tables per token.

A state is `(mode, pending, line_start)`: the part of the turn, the bytes read so far of a marker that is not
complete, and whether the marker (or the next byte) stands at the start of a line. Markers that are single ids
in the vocabulary are columns of their own as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from .families.family import Family
from .labels import Label


class Mode(Enum):
    """Where in the assistant's turn the next token stands."""

    START = "start"  # nothing but whitespace so far
    THINK = "think"
    READY = "ready"  # thinking has ended, nothing but whitespace since
    SAY = "say"
    ACT = "act"
    AFTER = "after"  # a call has ended, nothing but whitespace since
    DONE = "done"
    # Channels (gpt-oss): a header names the recipient and the channel, then a body follows.
    HEAD = "head"
    HEAD_TO = "head-to"
    CHANNEL = "channel"
    CHANNEL_TO = "channel-to"
    ANALYSIS = "analysis"
    ANALYSIS_TO = "analysis-to"


LABEL_OF: dict[Mode, Label] = {
    Mode.START: Label.SAY,
    Mode.THINK: Label.THINK,
    Mode.READY: Label.SAY,
    Mode.SAY: Label.SAY,
    Mode.ACT: Label.ACT,
    Mode.AFTER: Label.ACT,
    Mode.DONE: Label.GLUE,
    **dict.fromkeys(
        (Mode.HEAD, Mode.HEAD_TO, Mode.CHANNEL, Mode.CHANNEL_TO, Mode.ANALYSIS, Mode.ANALYSIS_TO), Label.GLUE
    ),
}
IDLE = (Mode.START, Mode.READY, Mode.AFTER)  # modes that last while only whitespace comes
SPACE = frozenset(b" \t\r\n\f\v")


@dataclass(frozen=True)
class State:
    """One state; see the module's text."""

    mode: Mode
    pending: bytes = b""
    line_start: bool = True


@dataclass(frozen=True)
class Rule:
    """In `mode`, the marker leads to `target`; its own tokens take the label of `owner`."""

    marker: str
    mode: Mode
    target: Mode
    owner: Mode
    line_start: bool = False  # only at the start of a line

    @cached_property
    def label(self) -> Label:
        return LABEL_OF[self.owner]


def family_rules(family: Family) -> list[Rule]:
    """Every marker of the family in every mode where it means something."""
    if family.channels:
        return _channel_rules()
    rules: list[Rule] = []
    for block in family.think:
        rules.append(Rule(block.open, Mode.START, Mode.THINK, Mode.THINK))
        if block.close:
            rules.append(Rule(block.close, Mode.THINK, Mode.READY, Mode.THINK))
    closers = {block.close for block in family.act}
    for block in family.act:
        for mode in (Mode.START, Mode.READY, Mode.SAY, Mode.AFTER):
            rules.append(Rule(block.open, mode, Mode.ACT, Mode.ACT))
        # A call while thinking ends it, as the engines' parsers do, unless prose mentions the tag.
        rules.append(Rule(block.open, Mode.THINK, Mode.ACT, Mode.ACT, line_start=True))
    rules += [Rule(close, Mode.ACT, Mode.AFTER, Mode.ACT) for close in sorted(c for c in closers if c)]
    if family.bare_call:
        for character in family.bare_call:
            rules += [Rule(character, mode, Mode.ACT, Mode.ACT) for mode in (Mode.START, Mode.READY)]
    rules += [Rule(end, mode, Mode.DONE, Mode.DONE) for end in family.turn_end for mode in _OPEN_MODES]
    return rules


_OPEN_MODES = (Mode.START, Mode.THINK, Mode.READY, Mode.SAY, Mode.ACT, Mode.AFTER)
_HEADS = (Mode.HEAD, Mode.HEAD_TO, Mode.CHANNEL, Mode.CHANNEL_TO, Mode.ANALYSIS, Mode.ANALYSIS_TO)


def _channel_rules() -> list[Rule]:
    def glue(marker: str, mode: Mode, target: Mode) -> Rule:
        return Rule(marker, mode, target, Mode.DONE)

    rules = [
        glue("to=", Mode.HEAD, Mode.HEAD_TO),
        glue("to=", Mode.CHANNEL, Mode.CHANNEL_TO),
        glue("to=", Mode.ANALYSIS, Mode.ANALYSIS_TO),
        glue("<|channel|>", Mode.HEAD, Mode.CHANNEL),
        glue("<|channel|>", Mode.HEAD_TO, Mode.CHANNEL_TO),
        glue("analysis", Mode.CHANNEL, Mode.ANALYSIS),
        glue("analysis", Mode.CHANNEL_TO, Mode.ANALYSIS_TO),
    ]
    body = {Mode.ANALYSIS: Mode.THINK, Mode.HEAD: Mode.SAY, Mode.CHANNEL: Mode.SAY}
    rules += [glue("<|message|>", mode, body.get(mode, Mode.ACT)) for mode in _HEADS]
    rules += [glue("<|start|>", mode, Mode.HEAD) for mode in (*_HEADS, Mode.THINK, Mode.SAY, Mode.ACT)]
    for mode in (Mode.THINK, Mode.SAY, Mode.ACT, *_HEADS):
        rules.append(glue("<|end|>", mode, Mode.HEAD))
        rules += [glue(end, mode, Mode.DONE) for end in ("<|call|>", "<|return|>")]
    return rules


@dataclass(frozen=True)
class Step:
    """What one byte does: the next state, the byte's label, and how many bytes of a marker it completes.

    `owned` > 0: the last `owned` bytes are a marker and all take `label`.
    """

    state: State
    label: Label
    owned: int = 0


class Machine:
    """The family's machine over bytes.

    `is_column(marker)` says which markers are single ids, see `column`.
    """

    def __init__(self, family: Family, is_column: Callable[[str], bool] = lambda marker: False) -> None:
        self.family = family
        rules = family_rules(family)
        self.columns = [rule for rule in rules if is_column(rule.marker)]
        self._steps: dict[tuple[State, int], Step] = {}
        self._texts: dict[Mode, list[tuple[bytes, Rule]]] = {mode: [] for mode in Mode}
        for rule in rules:
            # Constrained decoding spells markers in plain pieces even where an id exists, and the engine's parsers
            # read the text: both count. But only the true id ends a turn or a channel's message.
            spelled = not (family.channels and is_column(rule.marker))
            if spelled and rule.target is not Mode.DONE:
                self._texts[rule.mode].append((rule.marker.encode(), rule))

    @cached_property
    def alphabet(self) -> dict[int, int]:
        """Every byte's stand-in: bytes that no marker holds all act alike."""
        known = {byte for texts in self._texts.values() for text, _ in texts for byte in text} | SPACE
        other = next(byte for byte in range(256) if byte not in known)
        return {byte: byte if byte in known else other for byte in range(256)}

    def initial(self, name: str) -> State:
        """State before the first sampled token; `name` is start, think, say or act."""
        if self.family.channels:
            return State({"start": Mode.HEAD, "think": Mode.THINK, "say": Mode.SAY, "act": Mode.ACT}[name])
        return State({"start": Mode.START, "think": Mode.THINK, "say": Mode.SAY, "act": Mode.ACT}[name])

    def byte(self, state: State, byte: int) -> Step:
        """Read one byte of text."""
        key = (state, byte)
        if key not in self._steps:
            self._steps[key] = self._step(state, byte)
        return self._steps[key]

    def _step(self, state: State, byte: int) -> Step:
        mode = state.mode
        if mode is Mode.DONE:
            return Step(state, Label.GLUE)
        read = state.pending + bytes([byte])
        first = state.line_start
        while read:
            rule = self._match(mode, read, first)
            if rule is not None:
                return Step(State(rule.target, b"", True), rule.label, len(read))
            if self._is_prefix(mode, read, first):
                return Step(State(mode, read, first), LABEL_OF[mode])
            if mode in IDLE and not (len(read) == 1 and read[0] in SPACE):
                mode = Mode.SAY  # text has begun; its markers may start within what was read
                continue
            first = read[0] == 0x0A
            read = read[1:]
        return Step(State(mode, b"", byte == 0x0A or (first and mode in IDLE)), LABEL_OF[mode])

    def column(self, state: State, marker: str) -> tuple[State, Label] | None:
        """Read a marker that is one id; None where the marker means nothing and is plain text."""
        for rule in self.columns:
            if rule.marker == marker and rule.mode is state.mode:
                at_line_start = state.line_start and not state.pending
                if not rule.line_start or at_line_start:
                    return State(rule.target), rule.label
        return None

    def skip(self, state: State) -> tuple[State, Label]:
        """Read a control token that is no marker: it breaks a half-read marker and adds nothing."""
        return State(state.mode, b"", False), LABEL_OF[state.mode]

    def _match(self, mode: Mode, read: bytes, first: bool) -> Rule | None:
        for text, rule in self._texts[mode]:
            if text == read and (first or not rule.line_start):
                return rule
        return None

    def _is_prefix(self, mode: Mode, read: bytes, first: bool) -> bool:
        return any(
            len(read) < len(text) and text.startswith(read) and (first or not rule.line_start)
            for text, rule in self._texts[mode]
        )


def reachable(machine: Machine, starts: Sequence[State], markers: Sequence[str]) -> list[State]:
    """All states that bytes, columns and skipped control tokens can reach, the starts first."""
    found: dict[State, None] = dict.fromkeys(starts)
    alphabet = set(machine.alphabet.values())
    queue = list(found)
    while queue:
        state = queue.pop()
        after = {machine.byte(state, byte).state for byte in alphabet}
        after |= {step[0] for marker in markers if (step := machine.column(state, marker))}
        after.add(machine.skip(state)[0])
        for new in after - found.keys():
            found[new] = None
            queue.append(new)
    return list(found)
