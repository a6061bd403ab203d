"""The compressed server against an independent Hugging Face run that computes every keep-set itself.

Tokens, log-probabilities, points of compaction, keep-sets and captured queries, over several turns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from conftest import Fleet
from duel import Duel, assert_same_queries, assert_same_turn, automaton_for
from oracle import PHASES, Replay, Settings, load_model
from server import Conversation
from transcripts import agent_steps, random_steps

pytestmark = pytest.mark.engine
TIES = 0.002
"""Largest share of kept entries that equal scores may leave open."""


def check(duel: Duel, budget: int, page: int = 1) -> None:
    """What must hold of a finished duel. Every compaction but the first works on a compressed window."""
    entries = ties = 0
    for one in duel.rounds:
        assert_same_turn(one)
        assert one.reply.facts["held"] == one.turn.held
        assert budget <= one.turn.held < budget + page
        assert one.reply.facts["logical"] == len(one.turn.output_ids) + one.reply.body["usage"]["prompt_tokens"]
        for compaction in one.turn.compactions:
            ties += compaction.ties
            entries += compaction.kept.numel()
    assert [one.reply.facts["state"] for one in duel.rounds] == ["new"] + ["resumed"] * (len(duel.rounds) - 1)
    assert sum(len(one.dumps) for one in duel.rounds) > len(duel.rounds)
    assert ties <= TIES * entries


@pytest.mark.parametrize("budget", [128, 160, 512])
def test_smollm2_three_turns(fleet: Fleet, smollm2: Path, budget: int) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    server = fleet.agentkv(smollm2, "--max-total-tokens", "16384").wait()
    duel = Duel(
        Conversation(server, budget, family="smollm2", salt=f"oracle-{budget}"),
        Replay(load_model(smollm2), Settings(budget)),
        automaton_for("smollm2", tokenizer),
        stop=frozenset([tokenizer.eos_token_id]),
    )
    for step in agent_steps(tokenizer):
        duel.play(step)
    check(duel, budget)
    counts = [assert_same_queries(one) for one in duel.rounds]
    assert all(sum(count[phase] for count in counts) > 0 for phase in PHASES)


@pytest.mark.parametrize("chunk", [256, 2048])
def test_long_decode_and_chunks(fleet: Fleet, tiny: Callable[..., Path], chunk: int) -> None:
    """Compactions every 128 decode tokens, at chunk ends and at turn ends, with pages of 16."""
    folder, page, budget = tiny("llama-gqa"), 16, 128
    flags = ("--page-size", str(page), "--chunked-prefill-size", str(chunk), "--max-total-tokens", "16384")
    server = fleet.agentkv(folder, *flags).wait()
    duel = Duel(
        Conversation(server, budget),
        Replay(load_model(folder), Settings(budget, page, chunk)),
        automaton_for("qwen3", transformers.AutoTokenizer.from_pretrained(folder)),
    )
    for step in random_steps([700, 40, 300, 333], [300, 150, 20, 1]):
        duel.play(step)
    check(duel, budget, page)
    lengths = [compaction.length for compaction in duel.rounds[0].turn.compactions]
    assert len(lengths) == (6 if chunk == 256 else 4)  # chunk ends, twice in decode, turn end
    for one in duel.rounds:
        assert_same_queries(one)
