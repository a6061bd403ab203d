"""Allowed combinations of server flags, every pair of values at least once: the tokens of stock SGLang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fleet import Fleet
from server import Conversation
from test_identity import BUDGET, assert_identical, session_turns, stock_turns
from transcripts import random_steps

pytestmark = [pytest.mark.engine, pytest.mark.long]
PAGES, CHUNKS, RANKS = (1, 16, 64), (256, 512, 8192), (1, 2, 3)
PAIRWISE = [(PAGES[i], CHUNKS[j], RANKS[(i + j) % 3]) for i in range(3) for j in range(3)]
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}
"""Six heads: one, two and three ranks can share them."""


def test_pairs_are_all_there() -> None:
    for a, b, first, second in ((0, 1, PAGES, CHUNKS), (0, 2, PAGES, RANKS), (1, 2, CHUNKS, RANKS)):
        assert {(row[a], row[b]) for row in PAIRWISE} == {(x, y) for x in first for y in second}


@pytest.mark.parametrize(("page", "chunk", "ranks"), sorted(PAIRWISE, key=lambda row: row[2]))
def test_flags(module_fleet: Fleet, tiny: Callable[..., Path], page: int, chunk: int, ranks: int) -> None:
    folder = tiny("llama-gqa", **HEADS)
    flags = ("--page-size", str(page), "--chunked-prefill-size", str(chunk), "--tp-size", str(ranks))
    steps = random_steps([600, 30, 270], [40, 150, 20], seed=50)
    answers = []
    for start in (module_fleet.stock, module_fleet.agentkv):
        server = start(folder, *flags, "--max-total-tokens", "8192").wait()
        if start == module_fleet.stock:
            answers.append(stock_turns(server, steps, ignore_eos=True))
        else:
            answers.append(session_turns(Conversation(server, BUDGET), steps, ignore_eos=True))
        module_fleet.stop()
    stock, ours = answers
    assert_identical(ours, stock)


def test_bf16_first_token(module_fleet: Fleet, tiny: Callable[..., Path]) -> None:
    """In bf16 a cached prefix and a recomputed one may differ in the last bits: log-probabilities within 2e-2."""
    folder = tiny("llama-gqa")
    steps = random_steps([600, 100], [20, 20], seed=51)
    flags = ("--max-total-tokens", "8192")
    stock = module_fleet.stock(folder, *flags, dtype="bfloat16").wait()
    ours = module_fleet.agentkv(folder, *flags, dtype="bfloat16").wait()
    theirs = stock_turns(stock, steps[:1], ignore_eos=True, logprobs=True)
    mine = session_turns(Conversation(ours, BUDGET), steps[:1], ignore_eos=True, logprobs=True)
    assert mine[0].output_ids[0] == theirs[0].output_ids[0]
    assert mine[0].logprobs[0] == pytest.approx(theirs[0].logprobs[0], abs=2e-2)
