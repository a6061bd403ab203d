"""Flags that would corrupt a compressed cache are refused by name; the launcher adds those that are needed."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from agentkv_serve.bench.serve.engine import EngineSettings
from agentkv_serve.engine import launch
from agentkv_serve.engine.config import ENVIRONMENT
from agentkv_serve.engine.flags import REFUSALS, REQUIRED, Refusal, RefusedFlagError, refuse
from agentkv_serve.engine.launch import cpu_environment, server_command
from agentkv_serve.model import default_model

WRONG: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "dllm_algorithm": "LowConfidence",
    "hicache_storage_backend": "file",
    "kv_canary": "log",
    "disaggregation_mode": "prefill",
    "kv_cache_dtype": "fp8_e5m2",
    "dcp_size": 2,
    "attn_cp_size": 2,
    "pp_size": 2,
    "dp_size": 2,
    "attn_dp_size": 2,
}
"""A refused value for each flag that is no switch."""


def arguments(**changes: Any) -> Any:
    harmless = {
        refusal.name: {"kv_cache_dtype": "auto", "disaggregation_mode": "null"}.get(refusal.name)
        if refusal.when is not bool
        else False
        for refusal in REFUSALS
    }
    harmless.update(enable_streaming_session=True)
    return SimpleNamespace(**{**harmless, **changes})


def test_harmless_arguments_pass() -> None:
    refuse(arguments())
    refuse(arguments(dp_size=1, pp_size=1, kv_cache_dtype="bfloat16", disaggregation_mode="null"))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_each_flag_is_refused_by_name_with_its_reason(refusal: Refusal) -> None:
    with pytest.raises(RefusedFlagError) as caught:
        refuse(arguments(**{refusal.name: WRONG.get(refusal.name, True)}))
    assert refusal.flag in str(caught.value) and refusal.reason in str(caught.value)


@pytest.mark.engine
def test_every_refused_flag_is_known_by_all_its_names() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    names = {name: action.option_strings for action in parser._actions for name in action.option_strings}
    for refusal in REFUSALS:
        assert set(names[refusal.flag]) == {refusal.flag, *filter(None, [refusal.also])}


def test_needed_flags_are_asked_for() -> None:
    with pytest.raises(RefusedFlagError, match="enable-streaming-session"):
        refuse(arguments(enable_streaming_session=False))


def test_every_flag_that_is_no_switch_has_a_refused_value_here() -> None:
    assert set(WRONG) == {refusal.name for refusal in REFUSALS if refusal.when is not bool}


def test_the_launcher_adds_what_is_needed_and_keeps_what_is_given() -> None:
    command = server_command(
        ["--page-size", "16", "--max-running-requests=4"], default_model(), 7, "127.0.0.1", cpu=True
    )
    for flag in REQUIRED:
        assert flag in command
    assert command[command.index("--device") + 1] == "cpu"
    assert "--max-running-requests" not in command and command[-1] == "--max-running-requests=4"
    on_gpu = server_command([], default_model(), 7, "127.0.0.1", cpu=False)
    assert "--disable-overlap-schedule" in command and "--disable-overlap-schedule" not in on_gpu
    assert "--device" not in on_gpu and on_gpu[on_gpu.index("--attention-backend") + 1] == "triton"


@pytest.mark.parametrize(
    ("capability", "megabytes", "wanted"),
    [("AVX2", 1, True), ("AVX512", 1, False), ("AVX2", 1 << 20, False)],
    ids=["no bfloat16", "bfloat16", "too large"],
)
def test_a_cpu_that_is_slow_in_bfloat16_serves_small_models_in_float32(
    capability: str, megabytes: int, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    shutil.copytree(default_model(), tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(megabytes << 20)  # sparse
    ours = server_command([], tmp_path, 7, "127.0.0.1", cpu=True)
    stock = EngineSettings("stock", tmp_path).command(7, "k", gpu=False)
    for command in (ours, stock):
        assert ("--dtype float32" in " ".join(command)) is wanted
    given = server_command(["--dtype", "bfloat16"], tmp_path, 7, "127.0.0.1", cpu=True)
    assert given.count("--dtype") == 1 and given[-1] == "bfloat16"
    assert "--dtype" not in server_command([], tmp_path, 7, "127.0.0.1", cpu=False)


def test_metrics_are_on_unless_turned_off_and_a_given_flag_wins() -> None:
    def count(given: list[str], metrics: bool) -> int:
        return server_command(given, default_model(), 7, "127.0.0.1", cpu=True, metrics=metrics).count(
            "--enable-metrics"
        )

    assert (count([], True), count([], False)) == (1, 0)
    assert (count(["--enable-metrics"], True), count(["--enable-metrics"], False)) == (1, 1)


def test_the_command_turns_metrics_off(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(launch.os, "execv", lambda path, command: started.append(command))
    monkeypatch.setattr(launch.selfcheck, "require_version", lambda: None)
    monkeypatch.setattr(launch, "has_gpu", lambda: False)
    monkeypatch.setenv(ENVIRONMENT, "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for flags in ([], ["--no-agentkv-metrics"]):
        told = CliRunner().invoke(launch.app, ["--model-path", str(default_model()), *flags])
        assert told.exit_code == 0, told.output
    assert ["--enable-metrics" in command for command in started] == [True, False]
    assert not any(word.startswith("--no-agentkv") for command in started for word in command)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (["--enable-mixed-chunk"], "--enable-mixed-chunk"),
        (["--dp-size", "2"], "--dp-size"),
        (["--page-size", "16", "--dp-size=2"], "--dp-size"),
        (["--data-parallel-size", "2"], "--dp-size"),
        (["--enable-hicache"], "--enable-hierarchical-cache"),
        (["--speculative-algorithm", "EAGLE"], "--speculative-algorithm"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype"),
        (["--lora-paths", "a=b"], "--lora-paths"),
    ],
)
def test_the_launcher_refuses_a_flag_before_anything_is_loaded(given: list[str], flag: str) -> None:
    with pytest.raises(typer.BadParameter, match=flag):
        server_command(given, default_model(), 7, "127.0.0.1", cpu=True)


@pytest.mark.parametrize(
    "given", [["--dp-size", "1"], ["--pp-size=1"], ["--kv-cache-dtype", "auto"], ["--dp-size"], ["--tp-size", "two"]]
)
def test_the_launcher_leaves_harmless_values_and_mistakes_to_sglang(given: list[str]) -> None:
    assert server_command(given, default_model(), 7, "127.0.0.1", cpu=True)[-len(given) :] == given


def test_the_launcher_asks_for_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no folder"):
        server_command([], tmp_path / "none", 7, "127.0.0.1", cpu=True)


@pytest.mark.parametrize(
    ("given", "cores", "expected"),
    [
        ([], 2, {"OMP_NUM_THREADS": "1"}),
        (["--tp-size", "one"], 8, {"OMP_NUM_THREADS": "7"}),
        (["--page-size=16", "--tp-size=3"], 2, {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0"}),
        (["--tensor-parallel-size", "2"], 9, {"OMP_NUM_THREADS": "4", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
    ],
)
def test_ranks_on_a_cpu_have_cores(given: list[str], cores: int, expected: dict[str, str]) -> None:
    assert cpu_environment(given, cores) == expected
