"""What policies cost: memory by count, and a benchmark that tells."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from agentkv_serve.bench.policies import policies
from agentkv_serve.engine.policies import get_policy, policy_names

app = typer.Typer()
app.command()(policies)


def test_the_benchmark_prints_every_policy_it_was_asked_for() -> None:
    arguments = ["--json", "--budget", "256", "--layers", "1", "--repeats", "1", "--model", "Llama-70B TP8"]
    result = CliRunner().invoke(app, [*arguments, "--names", "agentkv,streamingllm,triattention,h2o"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert list(told["policies"]) == ["agentkv", "streamingllm", "triattention", "h2o"]
    assert told["window"] == 384 and told["machine"]["cores"] >= 1
    for name, row in told["policies"].items():
        assert row["ring_queries"] == get_policy(name).ring_queries
        assert row["score_ms"]["n"] == 1 and row["score_ms"]["median"] > 0
    assert CliRunner().invoke(app, ["--model", "none"]).exit_code == 2


@pytest.mark.parametrize("name", policy_names())
def test_auxiliary_memory_of_an_8b_model(name: str) -> None:
    """Query rings, positions and notes, against the keys and values of a session: Qwen3-8B, 4,096 tokens, 16 bits."""
    policy = get_policy(name)
    kv = 4096 * 8 * 2 * 128 * 2
    rings = policy.ring_queries * 32 * 128 * 2
    notes = 4096 * 8 * (4 + policy.note_bytes)
    most = {"h2o": 0.08, "expected_attention": 0.14}.get(name, 0.05)  # rivals that keep many queries
    assert (rings + notes) / kv <= most
