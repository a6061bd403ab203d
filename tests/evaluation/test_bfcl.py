"""BFCL transcripts come out of bfcl-eval's own simulators; its environment is made on first use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentkv_serve.evaluation import bfcl
from agentkv_serve.evaluation.trajectory import read_recordings


def test_unknown_categories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(bfcl.BuildError, match="unknown categories live; known: base"):
        bfcl.build(tmp_path / "out.jsonl", ["base", "live"], tmp_path / "venv", False)
    assert not (tmp_path / "venv").exists()


@pytest.mark.long
def test_transcripts(tmp_path: Path) -> None:
    environment = Path(__file__).parents[2] / ".venv-bfcl"
    out = tmp_path / "bfcl.jsonl"
    assert bfcl.build(out, ["base", "long_context"], environment, False) == 400
    first = json.loads(out.read_text().splitlines()[0])
    assert (first["id"], first["task"]) == ("multi_turn_base_0", "bfcl_multi_turn_0")
    calls = [call["function"]["name"] for message in first["messages"] for call in message.get("tool_calls", [])]
    assert {tool["function"]["name"] for tool in first["tools"]} == set(calls)
    results = [message["content"] for message in first["messages"] if message["role"] == "tool"]
    assert len(results) == len(calls)
    assert '{"current_working_directory": "document"}' in results
    halves = [{r.task for r in read_recordings([out], half)} for half in ("development", "report")]
    assert len(halves[0] | halves[1]) == 200
    assert not halves[0] & halves[1]
