"""The replay against Hugging Face: without compression its logits are HF's, with one they are HF's under the mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_models import write_model

from agentkv_serve.engine.policies import AutoBudget, get_policy
from agentkv_serve.evaluation.decoder import Decoder
from agentkv_serve.evaluation.meter import Meter
from agentkv_serve.evaluation.replay import first_compaction, replay
from agentkv_serve.evaluation.session import Arm, Session

from . import runs


def measured(decoder, trajectory, arms, **settings):
    sessions = [Session(decoder, arm, trajectory.labels, trajectory.name) for arm in arms]
    meter = Meter(decoder, trajectory, sessions)
    for step in replay(decoder, trajectory, sessions, watch=meter.watch, **settings):
        meter.take(step)
    return sessions, meter


@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa", "llama-scaled-rope", "qwen2.5", "qwen3"])
@pytest.mark.parametrize("chunk", [7, 128])
def test_full_kv_equals_hugging_face(tmp_path: Path, family: str, chunk: int) -> None:
    decoder, model = runs.model(write_model(tmp_path, family))
    trajectory = runs.trajectory(tmp_path, turns=2)
    arm = Arm("roomy", get_policy("agentkv"), len(trajectory.ids))
    (session,), meter = measured(decoder, trajectory, [arm], chunk=chunk)
    predicted = np.flatnonzero(trajectory.generated)
    expected = -runs.logits(model, trajectory.ids).log_softmax(-1)[predicted - 1, trajectory.ids[predicted]]
    np.testing.assert_allclose(meter.reference.nll[predicted], expected, rtol=1e-4, atol=1e-4)
    assert not session.compactions
    assert not meter.tracks[0].kl[predicted].any()
    assert np.isnan(np.delete(meter.reference.nll, predicted)).all()


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2.5"])
def test_bfloat16_products_can_be_formed_in_float32(tmp_path: Path, family: str) -> None:
    """Other sums of the same products: what differs is bfloat16's rounding."""
    folder = write_model(tmp_path, family)
    trajectory = runs.trajectory(folder, turns=2)
    predicted = np.flatnonzero(trajectory.generated)
    found = []
    for dtype, compute in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, None)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        arm = Arm("roomy", get_policy("agentkv"), len(trajectory.ids))
        _, meter = measured(Decoder(model, compute), trajectory, [arm])
        found.append(meter.reference.nll[predicted])
    native, emulated, exact = found
    assert not np.array_equal(emulated, exact)
    np.testing.assert_allclose(emulated, native, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("chunk", [16, 128])
def test_compressed_equals_hugging_face_under_the_mask(folder: Path, chunk: int) -> None:
    """StreamingLLM keeps the same tokens in all layers and heads: what each query may see is one mask."""
    decoder, model = runs.model(folder)
    trajectory = runs.trajectory(folder)
    arm = Arm("stream", get_policy("streamingllm"), 60)
    session = Session(decoder, arm, trajectory.labels, trajectory.name)
    n = len(trajectory.ids)
    seen = torch.zeros(n, n, dtype=torch.bool)
    held = torch.zeros(0, dtype=torch.long)
    meter = Meter(decoder, trajectory, [session])
    end = 0
    for step in replay(decoder, trajectory, [session], chunk=chunk, every=32, watch=meter.watch):
        meter.take(step)
        if session.compactions and session.compactions[-1] == step.start:
            assert session.positions is not None
            assert (session.positions == session.positions[0, 0]).all()
            held = session.positions[0, 0].long()
        else:
            held = torch.cat((held, torch.arange(end, step.start)))
        assert session.held(step.end) == len(held) + step.end - step.start
        seen[step.start : step.end, held] = True
        fresh = torch.ones(step.end - step.start, step.end - step.start, dtype=torch.bool).tril()
        seen[step.start : step.end, step.start : step.end] = fresh
        end = step.start
        held = torch.cat((held, torch.arange(step.start, step.end)))
        end = step.end
    assert len(session.compactions) > 3
    predicted = np.flatnonzero(~np.isnan(meter.tracks[0].nll))
    ids = trajectory.ids[:end]
    masked = runs.logits(model, ids, seen[:end, :end]).log_softmax(-1)
    plain = runs.logits(model, ids).log_softmax(-1)
    expected = -masked[predicted - 1, trajectory.ids[predicted]]
    np.testing.assert_allclose(meter.tracks[0].nll[predicted], expected, rtol=1e-3, atol=1e-3)
    divergence = (plain.exp() * (plain - masked)).sum(-1)[predicted - 1]
    np.testing.assert_allclose(meter.tracks[0].kl[predicted], divergence, rtol=1e-3, atol=1e-3)
    assert meter.tracks[0].kl[predicted].max() > 0.01


def test_arms_do_not_touch_each_other(folder: Path) -> None:
    decoder, _ = runs.model(folder)
    trajectory = runs.trajectory(folder)
    arms = [Arm(name, get_policy(name), budget) for name in ("agentkv", "recent", "h2o", "rkv") for budget in (80, 140)]
    _, together = measured(decoder, trajectory, arms, chunk=64, every=32)
    for index in (1, 4):
        _, alone = measured(decoder, trajectory, [arms[index]], chunk=64, every=32)
        # Steps are cut where any session is due, so only rounding may differ.
        np.testing.assert_allclose(together.tracks[index].nll, alone.tracks[0].nll, rtol=1e-3, atol=1e-3)


def test_compactions_happen_where_the_engine_has_them(folder: Path) -> None:
    decoder, _ = runs.model(folder)
    trajectory = runs.trajectory(folder)
    arms = [Arm("ours", get_policy("agentkv"), 70), Arm("paper", get_policy("agentkv_paper"), 70)]
    (ours, paper), meter = measured(decoder, trajectory, arms, chunk=50, every=16)
    turns = [span for span in trajectory.spans if span.generated]
    prompt_ends = {span.start for span in turns}
    for span in turns:
        length = span.end - 1  # a turn's last token is computed with the next prompt
        if length > 70:
            assert ours.compactions.count(length) == 1 or length in prompt_ends
    assert set(range(100, turns[0].start, 50)) <= set(ours.compactions)
    assert prompt_ends - set(range(71)) <= set(ours.compactions)
    inside = [any(span.start < place < span.end - 1 for span in turns) for place in paper.compactions]
    assert paper.compactions
    assert all(inside)
    assert ours.compactions[0] == first_compaction(trajectory, 70, chunk=50, every=16)
    assert max(meter.tracks[0].held[~np.isnan(meter.tracks[0].held)]) <= 70 + 50


@pytest.mark.parametrize("budget", [10, 100, 150, 200, 250, 300, 10_000])
def test_first_compaction_is_known_beforehand(folder: Path, budget: int) -> None:
    decoder, _ = runs.model(folder)
    trajectory = runs.trajectory(folder)
    policy = get_policy("agentkv", sinks=2, recent=4)
    (session,), _ = measured(decoder, trajectory, [Arm("one", policy, budget)], chunk=33, every=20)
    assert first_compaction(trajectory, budget, chunk=33, every=20) == next(iter(session.compactions), None)


def test_an_automatic_budget_follows_the_bound(folder: Path) -> None:
    decoder, _ = runs.model(folder)
    trajectory = runs.trajectory(folder, turns=5)
    policy = get_policy("agentkv", sinks=4, recent=8)
    arms = [
        Arm(f"{epsilon}", policy, len(trajectory.ids) - 1, auto=AutoBudget(epsilon=epsilon, sharp=0.1, floor=64))
        for epsilon in (1.0, 0.1, -1.0)
    ]
    (loose, middle, strict), meter = measured(decoder, trajectory, arms, chunk=64, every=32)
    assert loose.budget == 64
    assert not strict.compactions
    assert 64 < middle.budget < len(trajectory.ids)
    predicted = ~np.isnan(meter.tracks[0].kl)
    held = [track.held[predicted].mean() for track in meter.tracks]
    assert held[0] < held[1] < held[2]
    assert not meter.tracks[2].kl[predicted].any()
