"""Every family that the engine serves, each as a tiny random model: compressed turns against the independent run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from duel import assert_same_queries, assert_same_turn
from fleet import PAGED, Arena, Fleet
from test_metrics import Scrape
from transcripts import random_steps

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]


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


def shared(ours: Any, theirs: Any) -> float:
    """Share of kept entries [layers, Hkv, K] that both sides keep; heads are in the same order."""
    pairs = zip(ours.reshape(-1, ours.shape[-1]), theirs.reshape(-1, theirs.shape[-1]), strict=True)
    return float(np.mean([np.isin(mine, other).mean() for mine, other in pairs]))


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha"])
def test_tensor_parallel(module_fleet: Fleet, tiny: Callable[..., Path], name: str) -> None:
    """Each rank compresses its own heads; all hold and free the same slots; one of them reports for all.

    Fewer KV heads than ranks are not here: on a CPU SGLang pads the heads and then cannot load the weights.
    """
    folder = tiny(name)
    module_fleet.stop()
    arena = Arena.of(module_fleet.agentkv(folder, *PAGED, "--tp-size", "2"), folder)
    with arena.duel(128) as duel:
        for step in random_steps([500, 60, 90], [150, 40, 20], seed=31):
            one = duel.play(step, follow=False)
            assert one.reply.output_ids == one.turn.output_ids
            assert one.reply.facts["held"] == one.turn.held
            assert one.reply.facts["phases"] == pytest.approx(one.turn.phases, abs=0.05)
        compactions = [compaction for one in duel.rounds for compaction in one.turn.compactions]
    folders = [arena.server.dumps, arena.server.dumps / "rank1"]
    names = [sorted(path.name for path in folder.glob("[0-9]*.npz")) for folder in folders]
    assert names[0] == names[1] and len(names[0]) == len(compactions) >= 5
    for file, compaction in zip(names[0], compactions, strict=True):
        first, second = (dict(np.load(folder / file)) for folder in folders)
        for field in ("length", "old_start", "start", "slots"):
            assert np.array_equal(first[field], second[field]), field
        kept = np.concatenate([first["kept"], second["kept"]], axis=1)
        assert shared(kept, compaction.kept.numpy()) > 0.995
    scrape = Scrape(arena.server)
    assert scrape.values["agentkv_compactions_total"] == len(compactions)
