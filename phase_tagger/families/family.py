"""What a model family writes around its phases: the one description that rendering and decoding share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Block:
    """Markers around one phase. `close` is None when the phase lasts until the end of the turn."""

    open: str
    close: str | None


Drift = Literal["A", "B", "C", "D", "?"]


@dataclass(frozen=True)
class Family:
    """Markers of one model family. Markers are text; ids are resolved against the vocabulary at load.

    `think`, `act`: blocks that the model writes. `tool`: wrappers that the template puts around tool results.
    `call`: openers of a single call within an act block; some templates print them alone.
    `turn_end`: tokens that end the assistant's turn. `turn_start`: texts that open any turn.
    `bare_call`: characters that open an unmarked call when they come first in the turn (Llama's JSON).
    `channels`: the turn is a sequence of channel messages (gpt-oss).
    `needs`: tokens that the vocabulary must have. `hints` / `lacks`: texts that the template must (not) hold.
    `unserved`: why the engine does not serve the family (labels exist all the same), or "".
    """

    name: str
    title: str
    think: tuple[Block, ...] = ()
    act: tuple[Block, ...] = ()
    tool: tuple[Block, ...] = ()
    call: tuple[str, ...] = ()
    turn_end: tuple[str, ...] = ()
    turn_start: tuple[str, ...] = ()
    bare_call: str = ""
    channels: bool = False
    needs: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    drift: Drift = "?"
    roles: dict[str, str] = field(default_factory=dict)
    header: tuple[str, str] = ("<|im_start|>", "\n")
    unserved: str = ""

    def __hash__(self) -> int:
        return hash(self.name)


THINK = Block("<think>", "</think>")
TOOL_CALL = Block("<tool_call>", "</tool_call>")
TOOL_RESPONSE = Block("<tool_response>", "</tool_response>")
EOS = "<|endoftext|>"
EOT = "<|im_end|>"
CHATML_START = ("<|im_start|>",)
