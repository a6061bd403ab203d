"""`agentkv bench label` on a tiny transcript."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentkv_serve.bench import label

from .tiny import tiny_tokenizer


def test_all_figures_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    label.label(tokenizer=tmp_path, tokens=9_000, appended=200, repeats=1, as_json=True)
    found = json.loads(capsys.readouterr().out)
    config, memory = found["config"], found["memory"]
    assert 6_000 < config["whole_tokens"] < 12_000 and 100 < config["appended_tokens"] < 400
    assert found["whole_s"]["n"] == 1 and found["appended_ms"]["median"] > 0
    assert memory["ids"] == pytest.approx(4 * config["whole_tokens"] / config["text_bytes"])
    assert memory["peak"] > memory["ids"] and set(found["targets"]) == set(label.TARGETS)
