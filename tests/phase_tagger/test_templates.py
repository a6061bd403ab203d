"""Every real chat template at hand against every recorded transcript."""

from __future__ import annotations

import pytest

from .packages import templates
from .templates_table import TABLE, Row, measure, rows, table, transcripts
from .transcripts import load

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    return rows()


def test_every_successful_rendering_is_verified(measured: list[Row]) -> None:
    assert len(measured) >= 100
    assert {row.name: row.unverified for row in measured if row.unverified} == {}
    assert sum(row.verified for row in measured) > 40 * len(measured)


def test_labels_keep_the_rules_under_every_template(measured: list[Row]) -> None:
    assert {row.name: row.faults[:3] for row in measured if row.faults} == {}


def test_injected_markers_change_no_label_under_any_template(measured: list[Row]) -> None:
    assert {row.name: row.injected for row in measured if row.injected} == {}


def test_runs_of_the_large_collection() -> None:
    """Where it is at hand: every tenth run, through every template."""
    runs = load("20_tau_airline_gpt4o_even_tasks.json")[::10]
    if not runs:
        # 1.7 MB that the repository does not carry; the runs in tests/ go through the same checks.
        pytest.skip("the large collection is not part of the repository")
    measured = [measure(name, source, runs) for name, source in templates().items()]
    assert {row.name: row.unverified + row.faults[:3] for row in measured if row.unverified or row.faults} == {}


@pytest.mark.parametrize(
    ("name", "family", "drift"),
    [
        ("trl/qwen2_5", "qwen2.5", "A"),
        ("trl/qwen3", "qwen3", "B"),
        ("trl/qwen3_8", "qwen3.5", "A"),
        ("llama.cpp/Qwen-QwQ-32B", "qwen3", "C"),
        ("llama.cpp/Qwen3-Coder", "qwen3-coder", "A"),
        ("llama.cpp/meta-llama-Llama-3.1-8B-Instruct", "llama3", "A"),
        ("llama.cpp/NVIDIA-Nemotron-Nano-v2", "nemotron-nano-v2", "C"),
        ("trl/nemotron_3_super", "nemotron3", "B"),
        ("llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-r1", "C"),
        ("llama.cpp/deepseek-ai-DeepSeek-V3.1", "deepseek-v3.1", "C"),
        ("llama.cpp/deepseek-ai-DeepSeek-V3.2", "deepseek-v3.2", "B"),
        ("llama.cpp/deepseek-ai-DeepSeek-V4", "deepseek-v4", "A"),
        ("trl/gptoss", "gpt-oss", "B"),
        ("llama.cpp/mistralai-Mistral-Nemo-Instruct-2407", "mistral", "D"),
        ("llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512", "magistral", "A"),
        ("trl/glm4moe", "glm4", "B"),
        ("llama.cpp/Kimi-K2-Instruct", "kimi-k2", "A"),
        ("llama.cpp/Kimi-K2-Thinking", "kimi-k2", "B"),
        ("llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", "C"),
        ("llama.cpp/HuggingFaceTB-SmolLM3-3B", "smollm3", "C"),
        ("llama.cpp/ibm-granite-granite-4.0", "granite4", "A"),
        ("trl/gemma3", "gemma3", "-"),
        ("trl/gemma4", "gemma4", "B"),
        ("llama.cpp/MiniMax-M2", "minimax-m2", "B"),
        ("llama.cpp/ByteDance-Seed-OSS", "seed-oss", "A"),
        ("trl/lfm2_2_5", "lfm2", "B"),
    ],
)
def test_families_and_drift(measured: list[Row], name: str, family: str, drift: str) -> None:
    row = next(row for row in measured if row.name == name)
    assert (row.family.name, row.drift) == (family, drift)


def test_the_document_is_up_to_date(measured: list[Row]) -> None:
    assert TABLE.read_text("utf-8") == table(measured, len(transcripts()))
