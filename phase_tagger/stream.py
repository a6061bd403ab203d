"""Labels of the assistant's text as it streams, with hold-back: settled labels, whatever the chunks.

The automaton must label a token at once, so the first tokens of a marker that is spelled in plain text keep the
label of what came before. Here such a prefix is held until the marker is complete or has failed.
"""

from __future__ import annotations

from .families import get_family
from .families.family import Family
from .labels import Label
from .machine import LABEL_OF, SPACE, Machine, Mode

Piece = tuple[str, Label]


class TextLabeller:
    """Reads the text of one assistant turn in chunks of any size; returns pieces whose label is final.

    `initial` as in `Automaton.initial`. Whitespace before the first text, after thinking and after a call is
    held too, since it belongs to what follows. Mutates itself; one instance per turn.
    """

    def __init__(self, family: Family | str, initial: str = "start") -> None:
        self.family = get_family(family) if isinstance(family, str) else family
        self._machine = Machine(self.family)
        self._state = self._machine.initial(initial)
        self._held = bytearray()

    def feed(self, text: str) -> list[Piece]:
        """Read more text; returns the pieces that are settled by it, in order, neighbours merged."""
        settled: list[tuple[bytearray, Label]] = []
        for byte in text.encode("utf-8", "surrogatepass"):
            self._read(byte, settled)
        return _merge(settled)

    def flush(self) -> list[Piece]:
        """The stream has ended: what is held becomes text of the current state."""
        settled: list[tuple[bytearray, Label]] = []
        self._settle(settled, len(self._held), LABEL_OF[self._state.mode])
        return _merge(settled)

    @property
    def open(self) -> Label | None:
        """THINK or ACT while such a block is open, else None."""
        mode = self._state.mode
        return LABEL_OF[mode] if mode in (Mode.THINK, Mode.ACT) else None

    def _read(self, byte: int, settled: list[tuple[bytearray, Label]]) -> None:
        before = self._state.mode
        step = self._machine.byte(self._state, byte)
        self._held.append(byte)
        self._state = step.state
        if step.owned:
            # Held text before the marker: whitespace goes with the marker, as what follows it.
            self._settle(settled, len(self._held) - step.owned, self._before(before, step.label))
            self._settle(settled, step.owned, step.label)
        elif self._state.mode in (Mode.START, Mode.READY, Mode.AFTER):
            return
        else:
            self._settle(settled, len(self._held) - len(self._state.pending), step.label)

    def _before(self, mode: Mode, label: Label) -> Label:
        idle = mode in (Mode.START, Mode.READY, Mode.AFTER)
        return label if idle or all(byte in SPACE for byte in self._held) else LABEL_OF[mode]

    def _settle(self, settled: list[tuple[bytearray, Label]], count: int, label: Label) -> None:
        if count <= 0:
            return
        # A character is never cut: its first bytes wait for the rest.
        while count < len(self._held) and self._held[count] & 0xC0 == 0x80:
            count -= 1
        if settled and settled[-1][1] == label:
            settled[-1][0].extend(self._held[:count])
        else:
            settled.append((self._held[:count], label))
        del self._held[:count]


def label_text(family: Family | str, text: str, initial: str = "start") -> list[Piece]:
    """Pieces of one whole assistant turn."""
    labeller = TextLabeller(family, initial)
    pieces = labeller.feed(text) + labeller.flush()
    merged: list[Piece] = []
    for piece, label in pieces:
        if merged and merged[-1][1] == label:
            merged[-1] = (merged[-1][0] + piece, label)
        else:
            merged.append((piece, label))
    return merged


def split_turn(family: Family, text: str) -> list[Piece]:
    """As `label_text`, without a walk through texts that hold no marker at all. Channels are never in the text."""
    markers = (block.open for block in (*family.think, *family.act))
    bare = tuple(family.bare_call)
    if family.channels or not (any(map(text.__contains__, markers)) or (bare and text.lstrip().startswith(bare))):
        return [(text, Label.SAY)]
    return label_text(family, text)


def _merge(settled: list[tuple[bytearray, Label]]) -> list[Piece]:
    return [(piece.decode("utf-8", "surrogatepass"), label) for piece, label in settled if piece]
