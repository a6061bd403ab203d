"""The token ledger of a session: the exact ids of every turn, as rendered and as sampled, with their labels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentkv_serve.gateway.encoding import digest
from agentkv_serve.gateway.sessions.meaning import Message, reasoning_of

Runs = list[int]  # flat start, end, label triples over token positions


@dataclass(frozen=True, slots=True)
class Turn:
    """One committed turn: the prompt tokens that it added and the tokens that the engine sampled.

    `link` is the chained digest through its assistant message, `parent` that of the turn before (None for the
    first). `runs` are flat (start, end, label) triples from position 0 of this turn. `open_block` is the label
    of a block that the sampled tokens leave open (a turn cut by its length limit while thinking), else -1.
    """

    link: bytes
    parent: bytes | None
    ids: array[int]
    runs: array[int]
    open_block: int
    reasoning: bytes
    call_ids: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens that this turn added to the conversation."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Match:
    """How far a request's messages are known: `turns` in order, covering `messages[:covered]`."""

    turns: tuple[Turn, ...]
    covered: int

    @property
    def link(self) -> bytes | None:
        """The chained digest of the last matched turn."""
        return self.turns[-1].link if self.turns else None


NO_MATCH = Match((), 0)


@dataclass(slots=True)
class Ledger:
    """A tree of turns by chained digest. `head` is the newest turn: the state that the engine holds."""

    turns: dict[bytes, Turn] = field(default_factory=dict)
    head: bytes | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all branches."""
        return sum(turn.tokens for turn in self.turns.values())

    def match(self, links: Sequence[bytes], messages: Sequence[Message]) -> Match:
        """The longest run of known turns at the start of `messages`; at least one message stays unmatched.

        `links` are the messages' chained digests. A message that carries other reasoning than the sampled one was
        edited by the client and ends the match; one that carries none matches.
        """
        for covered in range(len(messages) - 1, 0, -1):
            turn = self.turns.get(links[covered])
            if turn is None:
                continue
            path = self.path(turn.link)
            if path and _same_reasoning(path, messages[:covered]):
                return Match(path, covered)
        return NO_MATCH

    def path(self, link: bytes | None) -> tuple[Turn, ...]:
        """The turns from the conversation's start to `link`; none when one of them is missing."""
        turns = []
        while link is not None:
            turn = self.turns.get(link)
            if turn is None:
                return ()
            turns.append(turn)
            link = turn.parent
        return tuple(reversed(turns))

    def add(self, turn: Turn, max_tokens: int) -> list[Turn]:
        """Append `turn` and make it the head; returns the turns of old branches dropped to stay within
        `max_tokens` (the head's own path always stays)."""
        self.turns[turn.link] = turn
        self.head = turn.link
        keep = {t.link for t in self.path(turn.link)}
        total, dropped = self.tokens, []
        while total > max_tokens:
            parents = {t.parent for t in self.turns.values()}
            leaf = next((link for link in self.turns if link not in keep and link not in parents), None)
            if leaf is None:
                break
            gone = self.turns.pop(leaf)
            total -= gone.tokens
            dropped.append(gone)
        return dropped


def reasoning_digest(message: Message) -> bytes:
    """Digest of an assistant message's reasoning, b"" without any."""
    text = reasoning_of(message)
    return digest(text.encode("utf-8", "surrogatepass")) if text else b""


def _same_reasoning(path: Sequence[Turn], messages: Sequence[Message]) -> bool:
    # Assistant messages that no turn of ours stands for (a client's own history) were matched as text.
    known = {turn.reasoning for turn in path if turn.reasoning}
    given = {d for d in map(reasoning_digest, (m for m in messages if m.get("role") == "assistant")) if d}
    return given <= known if known else True


def concatenate(turns: Sequence[Turn], ids: Sequence[int], runs: Sequence[int]) -> tuple[array[int], Runs]:
    """All ids of a request and its runs in absolute positions: the turns' own, then the new `ids` with `runs`
    relative to them. Adjacent runs of one label are merged."""
    whole: array[int] = array("i")
    flat: Runs = []
    for turn in turns:
        extend_runs(flat, turn.runs, len(whole))
        whole.extend(turn.ids)
    extend_runs(flat, runs, len(whole))
    whole.extend(ids)
    return whole, flat


def extend_runs(flat: Runs, runs: Sequence[int], base: int) -> None:
    """Append flat `runs`, moved by `base`, to those that they go on from, merging equal neighbours. Mutates `flat`."""
    last = flat[-1] if flat else None
    numbers = iter(runs)
    for start, end, label in zip(numbers, numbers, numbers, strict=True):
        if label == last:
            flat[-2] = end + base
        else:
            flat += (start + base, end + base, label)
            last = label
