"""Allowed combinations of server flags, every pair of values at least once: the tokens of stock SGLang.

`AGENTKV_MATRIX=full` runs the whole product instead (54 pairs of servers, about an hour).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import pytest
from fleet import Fleet
from server import Conversation
from test_identity import BUDGET, assert_identical, session_turns, stock_turns
from transcripts import random_steps

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]
OVERLAP, PAGES, CHUNKS, RANKS = (False, True), (1, 16, 64), (256, 512, -1), (1, 2, 3)
VALUES = (OVERLAP, PAGES, CHUNKS, RANKS)
PAIRWISE = [(j == (i + 1) % 3, PAGES[i], CHUNKS[j], RANKS[(i + j) % 3]) for i in range(3) for j in range(3)]
ROWS = list(product(*VALUES)) if os.environ.get("AGENTKV_MATRIX") == "full" else PAIRWISE


def test_every_pair_of_values_is_there() -> None:
    for a, b in combinations(range(len(VALUES)), 2):
        assert {(row[a], row[b]) for row in PAIRWISE} == set(product(VALUES[a], VALUES[b])), (a, b)


@pytest.mark.parametrize(("overlap", "page", "chunk", "ranks"), sorted(ROWS, key=lambda row: row[3]))
def test_flags(
    module_fleet: Fleet,
    tiny: Callable[..., Path],
    smollm2: Path,
    overlap: bool,
    page: int,
    chunk: int,
    ranks: int,
) -> None:
    folder = smollm2 if ranks == 3 else tiny("llama-gqa")  # SmolLM2 has nine heads, the tiny model four
    flags = ("--page-size", str(page), "--chunked-prefill-size", str(chunk), "--tp-size", str(ranks))
    flags += ("--max-total-tokens", "8192")
    steps = random_steps([600, 30, 270], [20, 30, 10] if ranks == 3 else [40, 150, 20], seed=50)
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0"} if ranks > 1 else {}
    server = module_fleet.stock(folder, *flags, overlap=overlap, **cores).wait()
    stock = stock_turns(server, steps, ignore_eos=True)
    module_fleet.stop()
    server = module_fleet.agentkv(folder, *flags, "--agentkv-overlap" if overlap else "--no-agentkv-overlap").wait()
    ours = session_turns(Conversation(server, BUDGET), steps, ignore_eos=True)
    module_fleet.stop()
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
