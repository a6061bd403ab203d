"""The model folder: checks by name, whole or not used at all, one maker among several processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentkv_serve.model import DEFAULT, MANIFEST, ModelError, cache_dir, check_model, default_model

GOOD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}

BLOCK: dict[str, Any] = {"attention": {"no_op": False, "n_heads_in_group": 2}}


def write_model(folder: Path, leave_out: str = "", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "config.json": json.dumps({name: value for name, value in {**GOOD, **changes}.items() if value is not ...}),
        "tokenizer.json": "{}",
        "model.safetensors": "",
    }.items():
        if name != leave_out:
            (folder / name).write_text(text)
    return folder


def test_describes_a_folder(tmp_path: Path) -> None:
    info = check_model(write_model(tmp_path / "m"))
    assert (info.head_dim, info.kv_heads, info.context) == (16, 2, 512)
    assert info.kv_bytes == 2 * 2 * 2 * 16 * 2  # K and V, layers, KV heads, head size, bytes of bf16


def test_counts_the_layers_with_attention(tmp_path: Path) -> None:
    """Nemotron-NAS: KV heads by group, and layers without attention."""
    blocks = [BLOCK, {"attention": {"no_op": True, "n_heads_in_group": None}}]
    info = check_model(write_model(tmp_path / "m", num_key_value_heads=None, block_configs=blocks))
    assert (info.layers, info.kv_heads, info.kv_bytes) == (2, 2, 2 * 1 * 2 * 16 * 2)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_names_the_missing_part(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ModelError, match=missing.split(".")[-1]):
        check_model(write_model(tmp_path / "m", leave_out=missing))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"sliding_window": 256}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear-attention"),
        ({"mamba_d_state": 128}, "state-space"),
        ({"text_config": {"sliding_window": 256, "max_position_embeddings": 512}}, "sliding-window"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"block_configs": [BLOCK, {"attention": {"n_heads_in_group": 4}}]}, "Variable GQA"),
        ({"vocab_size": ...}, "does not give vocab_size"),
    ],
)
def test_refuses_what_cannot_be_served(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check_model(write_model(tmp_path / "m", **changes))


def test_an_unused_window_is_no_window(tmp_path: Path) -> None:
    check_model(write_model(tmp_path / "m", sliding_window=4096, use_sliding_window=False))


def test_the_command_prints_json_and_fails_with_the_reason(tmp_path: Path) -> None:
    good, bad = write_model(tmp_path / "good"), write_model(tmp_path / "bad", leave_out="tokenizer.json")
    command = [
        sys.executable,
        "-c",
        "from agentkv_serve.cli import main; main()",
        "model",
        "--json",
        "--path",
    ]
    done = subprocess.run([*command, str(good)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["layers"] == 2
    failed = subprocess.run([*command, str(bad)], capture_output=True, text=True)
    assert failed.returncode == 1 and "tokenizer.json" in failed.stderr


def test_the_default_model_is_whole() -> None:
    folder = default_model()
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["source"]["sha256"] == DEFAULT.sha256
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= manifest["files"].keys()
    info = check_model(folder)
    assert (info.layers, info.kv_heads, info.head_dim) == (30, 3, 64)


def _link_copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=lambda a, b: os.link(a, b))


def test_a_changed_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = default_model()
    _link_copy(source, tmp_path / "models" / DEFAULT.name)
    config = tmp_path / "models" / DEFAULT.name / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text.replace("8192", "4096"))  # same size: only the hash tells
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path))
    command = [sys.executable, "-c", "from agentkv_serve.cli import main; main()", "model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "was changed" in done.stderr


@pytest.mark.long
def test_two_processes_make_one_folder_and_replace_a_half_made_one(tmp_path: Path) -> None:
    half = tmp_path / "models" / DEFAULT.name
    write_model(half)  # no manifest: as left by a killed conversion of an older release
    program = "from agentkv_serve.model import default_model; print(default_model())"
    environment = {**os.environ, "AGENTKV_CACHE": str(tmp_path)}
    makers = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    outputs = [maker.communicate() for maker in makers]
    assert [out.strip() for out, _ in outputs] == [str(half)] * 2
    assert sum("fetching" in err for _, err in outputs) == 1
    assert check_model(half).layers == 30
    assert [p.name for p in half.parent.iterdir() if p.is_dir()] == [DEFAULT.name]


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "a"))
    assert cache_dir() == tmp_path / "a"
    monkeypatch.delenv("AGENTKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_dir() == tmp_path / "b" / "agentkv"
