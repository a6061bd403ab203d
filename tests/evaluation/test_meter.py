from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentkv_serve.engine.policies import get_policy
from agentkv_serve.evaluation.meter import Meter, long_copies
from agentkv_serve.evaluation.replay import replay
from agentkv_serve.evaluation.scores import score_arm
from agentkv_serve.evaluation.session import Arm, Session
from agentkv_serve.evaluation.trajectory import Span, Trajectory
from agentkv_serve.phase_tagger import DEFAULT_FOLD, Label

from . import runs
from .test_replay import measured


def plain(ids: list[int], labels: list[Label], evidence: list[int]) -> Trajectory:
    marks = np.isin(np.arange(len(ids)), evidence)
    return Trajectory("t", "t", np.array(ids), np.array(labels, np.int8), marks, (Span(0, len(ids), True),))


def test_long_copies() -> None:
    fact, filler = [1, 2, 3, 4], list(range(100, 400))
    ids = fact + filler + fact
    labels = [Label.TOOL] * 304 + [Label.ACT] * 4
    assert np.flatnonzero(long_copies(plain(ids, labels, list(range(4))))).tolist() == [306, 307]
    assert not long_copies(plain(ids, labels, [])).any(), "not from a tool result or a user"
    assert not long_copies(plain(ids, [Label.SAY] * 308, [0, 1, 2, 3])).any(), "not an action"
    near = fact + filler[:250] + fact
    assert not long_copies(plain(near, [Label.TOOL] * 254 + [Label.ACT] * 4, [0, 1, 2, 3])).any()
    again = fact + filler + fact + [50] * 10 + fact
    copied = long_copies(plain(again, [Label.TOOL] * 304 + [Label.ACT] * 18, [0, 1, 2, 3]))
    assert np.flatnonzero(copied).tolist() == [306, 307], "seen since"


def test_attention_measures(folder: Path) -> None:
    """Sharp misses and lost mass of a step, from Hugging Face's attention and what the session kept before it."""
    decoder, model = runs.model(folder)
    model.set_attn_implementation("eager")
    trajectory = runs.trajectory(folder)
    with torch.inference_mode():
        layers = model(torch.from_numpy(trajectory.ids)[None], output_attentions=True).attentions
    attention = torch.stack(layers)[:, 0].unflatten(1, (decoder.kv_heads, -1))  # [L, Hkv, G, n, n]
    phases = np.array([DEFAULT_FOLD[Label(label)] for label in trajectory.labels])
    session = Session(decoder, Arm("a", get_policy("recent"), 90), trajectory.labels, "t")
    meter = Meter(decoder, trajectory, [session])
    checked = 0
    for step in replay(decoder, trajectory, [session], chunk=64, every=32, watch=meter.watch):
        lost = meter.tracks[0].lost.copy()
        meter.take(step)
        if not step.generated or session.kept is None:
            continue
        gone = torch.zeros(decoder.layers, decoder.kv_heads, 1, step.start, dtype=torch.bool)
        gone[..., 0, : session.since] = ~session.kept
        for token in range(step.start, step.end):
            strength, best = attention[:, :, :, token, : step.start].max(-1, keepdim=True)
            missed = (strength > 0.1) & gone.expand(-1, -1, best.shape[2], -1).gather(-1, best)
            assert meter.tracks[0].misses[token] == pytest.approx(missed.float().mean().item(), abs=1e-6)
        mass = (
            attention[..., step.start : step.end, : step.start].sum((2, 3)).masked_fill(~gone[:, :, 0], 0).sum((0, 1))
        )
        expected = np.bincount(phases[: step.start], mass.numpy(), 4)
        np.testing.assert_allclose((meter.tracks[0].lost - lost).sum(0), expected, rtol=1e-3, atol=1e-3)
        checked += 1
    assert checked > 3
    assert np.nanmax(meter.tracks[0].misses) > 0


def test_scores_count_only_what_follows_the_first_compaction(folder: Path) -> None:
    decoder, _ = runs.model(folder)
    trajectory = runs.trajectory(folder)
    arm = Arm("a", get_policy("agentkv"), 90)
    (session,), meter = measured(decoder, trajectory, [arm], chunk=64, every=32)
    start = session.compactions[0]
    scored = score_arm(trajectory, meter, meter.tracks[0], session, start, long_copies(trajectory))
    assert scored is not None
    after = trajectory.generated & (np.arange(len(trajectory.ids)) > start)
    assert scored["n"] == after.sum() == scored["n_act"] + scored["n_say"]
    assert scored["kl"] == float(f"{meter.tracks[0].kl[after].mean():.6g}")
    assert 0 < scored["kv_tokens"] <= scored["peak_tokens"] <= 90 + 64
    assert set(scored["coverage"]) == {"others", "act", "tool"}
    assert all(0 < share <= 1 for share in scored["coverage"].values())
    assert score_arm(trajectory, meter, meter.tracks[0], session, None, long_copies(trajectory)) is None


def test_a_kept_cache_loses_nothing(folder: Path) -> None:
    decoder, _ = runs.model(folder)
    trajectory = runs.trajectory(folder)
    session = Session(decoder, Arm("a", get_policy("agentkv"), 10_000), trajectory.labels, "t")
    meter = Meter(decoder, replace(trajectory), [session])
    assert np.isnan(meter.tracks[0].kl).all()
    (_, meter) = measured(decoder, trajectory, [session.arm])
    assert not np.nansum(meter.tracks[0].misses)
    assert not meter.tracks[0].lost.any()
    assert meter.tracks[0].mass.any()
