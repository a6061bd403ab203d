from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from scipy.linalg import subspace_angles
from typer.testing import CliRunner

from agentkv_serve.cli import app
from agentkv_serve.evaluation.phases import Angles, describe, principal_angles, queries_at, spans_of
from agentkv_serve.phase_tagger import Label

from . import runs


def test_principal_angles_are_scipys() -> None:
    basis = torch.linalg.qr(torch.randn(3, 4, 20, 5, generator=torch.Generator().manual_seed(0)))[0].transpose(-1, -2)
    found = principal_angles(basis)
    assert found.shape == (3, 4, 4)
    for place in np.ndindex(found.shape):
        row, first, second = place
        expected = np.rad2deg(subspace_angles(basis[row, first].T.numpy(), basis[row, second].T.numpy())).mean()
        assert abs(found[place] - expected) < 0.05


def test_spans_are_whole_runs_of_enough_tokens() -> None:
    labels = np.array([Label.INPUT] * 20 + [Label.ACT] * 15 + [Label.TOOL] * 16 + [Label.SAY] * 40, np.int8)
    assert spans_of(labels) == [(0, 20, Label.INPUT), (35, 51, Label.TOOL), (51, 91, Label.SAY)]


def test_queries_are_hugging_faces(folder: Path) -> None:
    decoder, model = runs.model(folder)
    trajectory = runs.trajectory(folder)
    caught = []
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *call: caught.append(call[2][0]))
    runs.logits(model, trajectory.ids)
    places = np.array([3, 100, 290])
    plain = caught[0][places].view(3, decoder.query_heads, -1)
    cos, sin = (part[places, None] for part in decoder.rotation(len(trajectory.ids)))
    half = plain.shape[-1] // 2
    expected = plain * cos + torch.cat((-plain[..., half:], plain[..., :half]), -1) * sin
    torch.testing.assert_close(queries_at(decoder, trajectory, places)[1], expected, rtol=1e-4, atol=1e-4)


def made(gap: float, seed: int) -> Angles:
    generator = np.random.default_rng(seed)
    labels = np.array([Label.ACT, Label.SAY, Label.TOOL] * 6, np.int8)
    noise = generator.normal(0, 1, (2, 2, 18, 18))
    degrees = 50 + (noise + noise.transpose(0, 1, 3, 2)) / 2 + gap * (labels[:, None] != labels)
    return Angles(labels, degrees.astype(np.float32))


def test_a_gap_is_found_and_none_is_not() -> None:
    found = describe([made(4.0, 1), made(4.0, 2)])
    assert abs(found["gap"] - 4) < 0.3
    assert found["heads_with_gap"] == 1.0
    assert found["p_value"] < 0.01
    assert found["matrix"][2][2] < found["matrix"][2][4]
    assert describe([made(0.0, 3)])["p_value"] > 0.05


def test_command(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text(json.dumps({"messages": runs.messages(4)}))
    out = tmp_path / "phases.json"
    arguments = ["--traces", str(tmp_path / "runs.json"), "--json", str(out), "--model", str(folder), "--length", "500"]
    done = CliRunner().invoke(app, ["analyze", "phases", *arguments, "--least", "200"])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert len(found["after_rope"]["gap_by_head"]) == 2
    assert f"{found['after_rope']['inter']:.1f} degrees" in found["conclusion"]
    assert out.with_suffix(".png").stat().st_size > 10_000
