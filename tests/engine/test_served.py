"""Which policies a worker serves, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from agentkv_serve.engine.config import EngineConfig
from agentkv_serve.engine.policies.statistics import Statistics
from agentkv_serve.engine.policies.triattention import TriAttention
from agentkv_serve.engine.served import PolicyError, model_rope, of_model, served_policies
from agentkv_serve.engine.state import ModelShape


def shape(layers: int = 2, heads: int = 2) -> ModelShape:
    return ModelShape(tuple(range(layers)), heads, 1, 8, 8, 0.5, torch.float32, torch.device("cpu"))


@pytest.fixture
def statistics(tmp_path: Path) -> str:
    mean = torch.randn(2, 4, 4, dtype=torch.complex64)
    Statistics(mean, mean.abs() + 1).save(tmp_path / "s.pt", {})
    return str(tmp_path / "s.pt")


def test_by_default_all_that_need_no_larger_rings() -> None:
    policies = served_policies(EngineConfig())
    assert list(policies)[:2] == ["full", "agentkv"]
    assert {"agentkv_paper", "recent", "rkv", "streamingllm", "random"} <= set(policies)
    assert not {"snapkv", "h2o", "expected_attention", "triattention", "agentkv_plus"} & set(policies)
    larger = served_policies(EngineConfig(policy="agentkv_plus"))
    assert {"agentkv_plus", "agentkv", "actkv"} <= set(larger) and "h2o" not in larger


def test_named_policies_and_no_others(statistics: str) -> None:
    config = EngineConfig(policy="rkv", policies=("h2o", "triattention"), statistics=statistics)
    policies = served_policies(config)
    assert set(policies) == {"full", "rkv", "h2o", "triattention"}
    second = of_model(policies, shape(), 1, _rope())
    tri = second["triattention"]
    assert isinstance(tri, TriAttention) and tri.statistics is not None
    whole = policies["triattention"]
    assert isinstance(whole, TriAttention) and whole.statistics is not None
    assert torch.equal(tri.statistics.mean, whole.statistics.mean[:, 2:])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (EngineConfig(policy="bogus"), "known: full"),
        (EngineConfig(policies=("agentkv", "bogus")), "known: full"),
        (EngineConfig(policies=("triattention",)), "agentkv calibrate"),
        (EngineConfig(policies=("triattention",), statistics="/nonexistent"), "no statistics file"),
    ],
)
def test_what_cannot_be_served_is_refused(config: EngineConfig, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        served_policies(config)


def test_statistics_of_another_model_are_refused(statistics: str) -> None:
    policies = served_policies(EngineConfig(policies=("triattention",), statistics=statistics))
    with pytest.raises(PolicyError, match="calibrate this model"):
        of_model(policies, shape(layers=5), 0, _rope())
    with pytest.raises(PolicyError, match="halves of the head"):
        of_model(policies, shape(), 0, None)


class Rotary(torch.nn.Module):
    """A rotary embedding as SGLang's models hold it: cosines, then sines, per position."""

    def __init__(self, base: float, neox: bool) -> None:
        super().__init__()
        angles = torch.arange(200.0)[:, None] * base ** -(torch.arange(0, 16, 2) / 16)
        self.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], -1))
        self.is_neox_style = neox


def _config() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(hidden_size=64, num_attention_heads=4)


def _rope() -> object:
    return model_rope(torch.nn.Sequential(Rotary(10000.0, True)), _config())


@pytest.mark.parametrize("neox", [True, False])
def test_the_rotation_is_the_model_s_own(neox: bool) -> None:
    rope = model_rope(torch.nn.Sequential(Rotary(10000.0, neox)), _config())
    assert rope.frequencies.numel() == 8 and rope.interleaved != neox


def test_another_rotation_than_the_configuration_s_is_refused() -> None:
    with pytest.raises(PolicyError, match="rotates otherwise"):
        model_rope(torch.nn.Sequential(Rotary(500.0, True)), _config())
    with pytest.raises(PolicyError, match="none that is known"):
        model_rope(torch.nn.Sequential(torch.nn.Linear(2, 2)), _config())
