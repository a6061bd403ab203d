"""SGLang's Triton attention over windows, in a running server: on a CPU its kernels run in Triton's interpreter.

Eager decode and extends of mixed batches against the independent replay; CUDA graphs need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from duel import assert_same_queries, assert_same_turn
from fleet import Arena, Fleet
from transcripts import random_steps

pytestmark = [pytest.mark.engine, pytest.mark.long]
FLAGS = (
    *("--page-size", "16", "--chunked-prefill-size", "128", "--max-total-tokens", "4096"),
    *("--attention-backend", "triton", "--skip-server-warmup"),
)


def test_compressed_turns_equal_the_replay(module_fleet: Fleet, tiny: Callable[..., Path]) -> None:
    folder = tiny("llama-gqa")
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    server = module_fleet.agentkv(folder, *FLAGS, "--agentkv-kernels", "triton", **interpreter)
    arena = Arena.of(server, folder, chunk=128)
    with arena.duel(128) as compressed, arena.duel(4096) as whole:
        for step in random_steps([200, 40], [140, 10], seed=80):
            for duel in (compressed, whole):
                one = duel.play(step)
                assert_same_turn(one)
                assert_same_queries(one)
        assert sum(len(one.dumps) for one in compressed.rounds) >= 3
        assert not any(one.dumps for one in whole.rounds)
