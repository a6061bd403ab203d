"""The ledger: branches, matches, runs in absolute positions, and its bound."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv_serve.gateway.encoding import digest
from agentkv_serve.gateway.sessions.ledger import NO_MATCH, Ledger, Turn, concatenate


def turn(name: bytes, parent: bytes | None = None, tokens: int = 10, reasoning: bytes = b"") -> Turn:
    runs = array("i", [0, tokens - 2, 0, tokens - 2, tokens, 4])
    return Turn(name, parent, array("i", range(tokens)), runs, -1, reasoning, ())


M = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "3"},
]
LINKS = [b"0", b"u1", b"a", b"u2", b"b", b"u3"]


def test_the_longest_known_history_matches() -> None:
    ledger = Ledger()
    ledger.add(turn(b"a"), 1000)
    assert ledger.match(LINKS, M).covered == 2
    ledger.add(turn(b"b", b"a"), 1000)
    match = ledger.match(LINKS, M)
    assert (match.covered, match.link, [t.link for t in match.turns]) == (4, b"b", [b"a", b"b"])


def test_one_message_always_stays_new() -> None:
    ledger = Ledger()
    ledger.add(turn(b"a"), 1000)
    assert ledger.match(LINKS[:3], M[:2]) is NO_MATCH


def test_nothing_matches_an_empty_or_foreign_ledger() -> None:
    assert Ledger().match(LINKS, M) is NO_MATCH
    ledger = Ledger()
    ledger.add(turn(b"other"), 1000)
    assert ledger.match(LINKS, M) is NO_MATCH


@pytest.mark.parametrize(("given_reasoning", "covered"), [(None, 4), ("r", 4), ("edited", 2)])
def test_reasoning_counts_only_when_it_is_sent(given_reasoning: str | None, covered: int) -> None:
    ledger = Ledger()
    ledger.add(turn(b"a"), 1000)
    ledger.add(turn(b"b", b"a", reasoning=digest(b"r")), 1000)
    messages = [dict(m) for m in M]
    if given_reasoning:
        messages[3]["reasoning_content"] = f" {given_reasoning}\n"
    assert ledger.match(LINKS, messages).covered == covered


def test_old_branches_give_way_and_the_newest_path_stays() -> None:
    ledger = Ledger()
    ledger.add(turn(b"a"), 35)
    ledger.add(turn(b"b1", b"a"), 35)
    ledger.add(turn(b"c1", b"b1"), 35)
    dropped = ledger.add(turn(b"b2", b"a"), 35)
    assert [t.link for t in dropped] == [b"c1"]
    dropped = ledger.add(turn(b"c2", b"b2"), 35)
    assert [t.link for t in dropped] == [b"b1"]
    assert ledger.add(turn(b"d2", b"c2"), 35) == []
    assert ledger.tokens == 40 and ledger.head == b"d2"


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=6))
def test_runs_of_parts_cover_the_whole(labels: list[list[int]]) -> None:
    parts = []
    for part in labels:
        runs: list[int] = []
        for i, label in enumerate(part):
            runs += (i, i + 1, label)
        parts.append(Turn(b"x", None, array("i", part), array("i", runs), -1, b"", ()))
    *turns, last = parts
    ids, flat = concatenate(turns, last.ids, list(last.runs))
    assert list(ids) == [n for part in labels for n in part]
    triples = [tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)]
    assert [label for start, end, label in triples for _ in range(end - start)] == list(ids)
    assert [s for s, _, _ in triples] == [0, *(e for _, e, _ in triples[:-1])]
    assert all(a[2] != b[2] for a, b in zip(triples, triples[1:], strict=False))  # noqa: RUF007
