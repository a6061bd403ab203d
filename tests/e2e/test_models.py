"""Every family that the engine serves, each as a tiny random model: compressed turns against the independent run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from duel import assert_same_queries, assert_same_turn
from fleet import PAGED, Arena, Fleet
from transcripts import random_steps

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "llama-scaled-rope", "qwen2.5", "qwen3", "nemotron-nas"])
def test_compressed_turns_of_every_family(module_fleet: Fleet, tiny: Callable[..., Path], name: str) -> None:
    folder = tiny(name)
    module_fleet.stop()  # one server at a time
    arena = Arena.of(module_fleet.agentkv(folder, *PAGED), folder)
    with arena.duel(128) as duel:
        for step in random_steps([500, 60, 90], [150, 40, 20], seed=30):
            one = duel.play(step)
            assert_same_turn(one)
            assert_same_queries(one)
        assert [one.reply.facts["state"] for one in duel.rounds] == ["new", "resumed", "resumed"]
        compactions = [compaction for one in duel.rounds for compaction in one.turn.compactions]
        assert len(compactions) >= 5
        assert sum(compaction.ties for compaction in compactions) <= 0.002 * sum(
            compaction.kept.numel() for compaction in compactions
        )


@pytest.mark.parametrize(("name", "ranks"), [("llama-gqa", 2), ("llama-mha", 2), ("llama-mqa", 2)])
def test_tensor_parallel(module_fleet: Fleet, tiny: Callable[..., Path], name: str, ranks: int) -> None:
    """Each rank compresses its own heads; all free the same slots, or the strict checks of one of them would fail.

    With fewer KV heads than ranks SGLang keeps copies of a head, which must choose alike.
    """
    folder = tiny(name)
    module_fleet.stop()
    arena = Arena.of(module_fleet.agentkv(folder, *PAGED, "--tp-size", str(ranks), AGENTKV_DUMP=""), folder)
    with arena.duel(128) as duel:
        for step in random_steps([500, 60, 90], [150, 40, 20], seed=31):
            one = duel.play(step, follow=False)
            assert one.reply.output_ids == one.turn.output_ids
            assert one.reply.facts["held"] == one.turn.held
            assert one.reply.facts["phases"] == pytest.approx(one.turn.phases, abs=0.05)
