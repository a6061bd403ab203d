"""The compressed server against an independent Hugging Face run that computes every keep-set itself.

Tokens, log-probabilities, points of compaction, keep-sets and captured queries, over several turns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from duel import Duel, assert_same_queries, assert_same_rings, assert_same_turn
from fleet import PAGED, Arena, Fleet
from oracle import PHASES
from transcripts import agent_steps, random_steps

pytestmark = pytest.mark.engine
TIES = 0.002
"""Largest share of kept entries that equal scores may leave open."""


def check(duel: Duel, budget: int, page: int = 1) -> None:
    """What must hold of a finished duel. Every compaction but the first works on a compressed window."""
    entries = ties = 0
    for one in duel.rounds:
        assert_same_turn(one)
        assert budget <= one.turn.held < budget + page
        assert one.reply.facts["logical"] == len(one.turn.output_ids) + one.reply.body["usage"]["prompt_tokens"]
        for compaction in one.turn.compactions:
            ties += compaction.ties
            entries += compaction.kept.numel()
    assert [one.reply.facts["state"] for one in duel.rounds] == ["new"] + ["resumed"] * (len(duel.rounds) - 1)
    assert sum(len(one.dumps) for one in duel.rounds) > len(duel.rounds)
    assert ties <= TIES * entries


@pytest.mark.parametrize("budget", [128, pytest.param(160, marks=pytest.mark.long), 512])
def test_smollm2_three_turns(fleet: Fleet, smollm2: Path, budget: int) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    server = fleet.agentkv(smollm2, "--max-total-tokens", "16384")
    arena = Arena.of(server, smollm2, page=1, chunk=4096, family="smollm2")
    with arena.duel(budget, stop=frozenset([tokenizer.eos_token_id])) as duel:
        for step in agent_steps(tokenizer):
            duel.play(step)
    check(duel, budget)
    counts = [assert_same_queries(one) for one in duel.rounds]
    assert all(sum(count[phase] for count in counts) > 0 for phase in PHASES)


@pytest.mark.parametrize("chunk", [256, pytest.param(2048, marks=pytest.mark.long)])
def test_long_decode_and_chunks(fleet: Fleet, tiny: Callable[..., Path], chunk: int) -> None:
    """Compactions every 128 decode tokens, at chunk ends and at turn ends, with pages of 16."""
    folder, budget = tiny("llama-gqa"), 128
    flags = [str(chunk) if flag == "256" else flag for flag in PAGED]
    arena = Arena.of(fleet.agentkv(folder, *flags), folder, chunk=chunk)
    with arena.duel(budget) as duel:
        for step in random_steps([700, 40, 300, 333], [300, 150, 20, 1]):
            duel.play(step)
    check(duel, budget, arena.page)
    lengths = [compaction.length for compaction in duel.rounds[0].turn.compactions]
    assert len(lengths) == (6 if chunk == 256 else 4)  # chunk ends, twice in decode, turn end
    for one in duel.rounds:
        assert_same_queries(one)


def test_captured_queries_without_any_compaction(arena: Arena) -> None:
    """Every turn's rings, prompt and sampled tokens of each phase, equal the model's own queries after RoPE."""
    with arena.duel(4096) as duel:
        for step in random_steps([300, 40, 60, 50], [30, 20, 40, 20], seed=60):
            one = duel.play(step)
            assert not one.dumps
            assert_same_turn(one)
            assert_same_rings(duel.rings(), duel.expected_rings())
    newest = duel.replay.rings.positions(0)
    assert [len(positions) for positions in newest] == [8, 8, 8, 8]
