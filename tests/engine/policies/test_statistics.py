"""Query statistics: RoPE undone, the published file format, and a calibration of a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from agentkv_serve.engine.calibrate import app
from agentkv_serve.engine.policies import Rope
from agentkv_serve.engine.policies.statistics import Statistics, StatisticsError

sys.path.append(str(Path(__file__).parents[2] / "models"))
from tiny_models import write_model


def config(**fields: object) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, **fields)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_unrotate_undoes_the_library_s_own_rotation(parameters: dict[str, object]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    llama = config(rope_parameters=parameters)
    positions = torch.tensor([0, 1, 17, 1023])
    plain = torch.randn(1, 4, 4, 16)
    cos, sin = LlamaRotaryEmbedding(llama)(plain, positions[None])
    rotated, _ = apply_rotary_pos_emb(plain, plain, cos, sin)
    rope = Rope.from_config(llama)
    torch.testing.assert_close(rope.unrotate(rotated[0], positions), plain[0], rtol=1e-3, atol=1e-3)
    assert (rope.attention_scaling != 1.0) == (parameters["rope_type"] == "yarn")


def test_rotation_that_changes_with_the_length_is_refused() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="changes with the length"):
        Rope.from_config(config(rope_parameters=parameters))


def test_pair_orders_are_inverse() -> None:
    rope = Rope(torch.tensor([1.0, 0.1, 0.01]), interleaved=True)
    vector = torch.arange(8.0)
    assert rope.paired(vector).tolist() == [0, 2, 4, 1, 3, 5, 6, 7]
    assert torch.equal(rope.paired(vector)[rope.order(8)], vector)


def test_file_round_trip_and_its_format(tmp_path: Path) -> None:
    mean = torch.randn(2, 3, 4, dtype=torch.complex64)
    Statistics(mean, mean.abs() + 1).save(tmp_path / "deep" / "s.pt", {"head_dim": 8})
    raw = torch.load(tmp_path / "deep" / "s.pt", weights_only=True)
    assert raw["metadata"]["head_dim"] == 8 and raw["metadata"]["sampled_heads"][4] == [1, 1]
    assert set(raw["stats"]["layer01_head02"]) == {"q_mean_real", "q_mean_imag", "q_abs_mean"}
    read = Statistics.load(tmp_path / "deep" / "s.pt")
    assert torch.equal(read.mean, mean) and torch.equal(read.magnitude, mean.abs() + 1)
    part = read.of_rank(2, 1, 2, torch.device("cpu"))
    assert torch.equal(part.mean, mean[:, 1:])
    with pytest.raises(StatisticsError, match="calibrate this model"):
        read.of_rank(5, 0, 3, torch.device("cpu"))
    with pytest.raises(StatisticsError, match="calibrate this model"):
        read.of_rank(2, 2, 2, torch.device("cpu"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StatisticsError, match="agentkv calibrate"):
        Statistics.load(tmp_path / "none.pt")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(StatisticsError, match="agentkv calibrate"):
        Statistics.load(tmp_path / "other.pt")
    rows = {name: torch.zeros(4) for name in ("q_mean_real", "q_mean_imag", "q_abs_mean")}
    torch.save({"metadata": {}, "stats": {"layer00_head00": rows, "layer01_head01": rows}}, tmp_path / "holes.pt")
    with pytest.raises(StatisticsError, match="2 heads"):
        Statistics.load(tmp_path / "holes.pt")


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3"])
def test_calibrate_measures_the_model_s_own_queries(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / family, family)
    text = "An agent calls a tool; the tool answers. " * 40
    (tmp_path / "text.txt").write_text(text)
    arguments = ["--model", str(folder), "--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "s.pt")]
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--max-length", "1100"])
    assert result.exit_code == 0, result.output
    read = Statistics.load(tmp_path / "s.pt")

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = model.model.layers
    inputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, index=index: inputs.update(
                {index: kwargs.get("hidden_states", args[0] if args else None)}
            ),
            with_kwargs=True,
        )
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"][:1100]
    with torch.no_grad():
        model(torch.tensor([ids]))
        for index, layer in enumerate(layers):
            attention = layer.self_attn
            queries = attention.q_proj(inputs[index])[0].view(1100, -1, attention.head_dim)
            if family == "qwen3":
                queries = attention.q_norm(queries)
            half = attention.head_dim // 2
            pairs = torch.complex(queries[..., :half], queries[..., half:])
            torch.testing.assert_close(read.mean[index], pairs.mean(0), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(read.magnitude[index], pairs.abs().mean(0), rtol=1e-3, atol=1e-3)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama-one-layer")
    (tmp_path / "text.txt").write_text("short")
    arguments = ["--model", str(folder), "--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "s.pt")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "at least 1024" in result.output
