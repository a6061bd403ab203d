"""What the task benchmarks read, refuse and print."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from agentkv_serve.tasks import runs
from agentkv_serve.tasks.bfcl import check_categories
from agentkv_serve.tasks.environment import EnvironmentFailed, environment
from agentkv_serve.tasks.paper import references
from agentkv_serve.tasks.tau2 import check_tree, model_of, script_of


def outcome(task: str, valid: bool, **more: Any) -> dict[str, Any]:
    return {"task": task, "valid": valid, "why": None, "overtime": False, "error": "", **more}


def test_everything_kept_comes_first() -> None:
    rows = runs.settings(["agentkv", "rkv"], [512, 1024])
    assert [row.name for row in rows] == ["full", "agentkv-512", "agentkv-1024", "rkv-512", "rkv-1024"]
    assert (rows[0].policy, rows[0].budget) == ("full", "full")


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    rows = runs.settings(["agentkv"], [512])
    full = [outcome("a", True), outcome("b", True), outcome("c", False), outcome("d", False)]
    ours = [
        outcome("a", True),
        outcome("b", False),
        outcome("c", False, overtime=True),
        outcome("d", False, error="500"),
    ]
    for row, outcomes in zip(rows, (full, ours), strict=True):
        (tmp_path / f"{row.name}.json").write_text(json.dumps(outcomes))
    turns = [
        {"task": "a", "state": "new", "evicted_tokens": 0, "logical_tokens": 600, "kv_tokens": 600},
        {"task": "b", "state": "new", "evicted_tokens": 100, "logical_tokens": 700, "kv_tokens": 512},
        {"task": "a", "state": "resumed", "evicted_tokens": 300, "logical_tokens": 900, "kv_tokens": 512},
        {"task": "b", "state": "rebuilt", "evicted_tokens": 0},
    ]
    (tmp_path / "agentkv-512.turns.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return runs.summary(rows, tmp_path, references("bfcl", {"multi_turn"}))


def test_scores_are_paired_task_by_task(summary: dict[str, Any]) -> None:
    full, ours = summary["rows"]
    assert (full["score"], ours["score"], full["against_full"]) == (0.5, 0.25, None)
    against = ours["against_full"]
    assert against["difference"] == -0.25 and (against["better_in"], against["worse_in"]) == (0, 1)
    assert against["difference_95"][0] < -0.25 < against["difference_95"][1] <= 0
    assert (ours["overtime"], ours["errors"], ours["error_texts"]) == (1, 1, ["500"])


def test_the_engines_word_on_every_later_turn_is_counted(summary: dict[str, Any]) -> None:
    ours = summary["rows"][1]
    assert (ours["sessions"], ours["turns"], ours["later_turns"], ours["later_turns_resumed"]) == (2, 4, 2, 1)
    assert ours["states"] == {"new": 2, "resumed": 1, "rebuilt": 1}
    assert (ours["turns_compressed"], ours["logical_tokens_max"], ours["kv_tokens_max"]) == (2, 900, 600)


def test_the_table_has_the_published_rows(summary: dict[str, Any]) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    runs.show(summary, "BFCL", console)
    lines = console.export_text().splitlines()
    assert any("agentkv-512" in line and "1 of 2" in line for line in lines)
    row = next(line for line in lines if "Qwen3-8B" in line and "agentkv" in line)
    assert "multi_turn" in row and "2048: 17.0  3072: 26.5  4096: 38.0" in row


@pytest.mark.parametrize(
    ("benchmark", "group", "rows"),
    [("bfcl", "multi_turn", 20), ("bfcl", "web_search", 20), ("tau2", "airline", 20), ("tau2", "telecom", 20)],
)
def test_published_rows_are_whole(benchmark: str, group: str, rows: int) -> None:
    found = references(benchmark, {group})
    assert len(found) == rows
    full = [row for row in found if row.policy == "full"]
    assert len(full) == 2 and all(row.budget is None for row in full)
    assert {row.policy for row in found} == {"full", "agentkv", "rkv", "triattention"}


def test_web_search_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPAPI_API_KEY", raising=False)
    check_categories(["multi_turn", "memory_kv"])
    with pytest.raises(typer.BadParameter, match="SERPAPI_API_KEY"):
        check_categories(["web_search_base"])
    monkeypatch.setenv("SERPAPI_API_KEY", "k")
    check_categories(["web_search"])


def test_an_environment_that_is_there_is_used_as_it_is(tmp_path: Path) -> None:
    wanted = ["3.11", "nothing==1", "-left-out"]
    (tmp_path / ".agentkv-done").write_text("\n".join(wanted))
    found = environment(tmp_path, ["nothing==1"], Console(quiet=True), python="3.11", without=["left-out"])
    assert found == tmp_path / "bin" / "python"


def test_what_the_installer_says_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"uv venv --quiet failed:\n.*9\.9"):
        environment(tmp_path, ["nothing==1"], Console(quiet=True), python="9.9")


def test_a_checkout_that_lacks_data_is_refused_with_the_files(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no checkout of tau2-bench"):
        check_tree(tmp_path, ["retail"])
    (tmp_path / "src" / "tau2").mkdir(parents=True)
    folder = tmp_path / "data" / "tau2" / "domains" / "retail"
    folder.mkdir(parents=True)
    for name in ("tasks.json", "split_tasks.json", "policy.md"):
        (folder / name).write_text("")
    with pytest.raises(typer.BadParameter, match=r"lacks data/tau2/domains/retail/db\.json:"):
        check_tree(tmp_path, ["retail"])
    (folder / "db.json").write_text("")
    check_tree(tmp_path, ["retail"])
    with pytest.raises(typer.BadParameter, match="no domain bank"):
        check_tree(tmp_path, ["bank"])


def test_users_are_scripts_or_models(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"*": ["hello"]}')
    assert script_of(script) == {"script": {"*": ["hello"]}}
    script.write_text('["hello"]')
    with pytest.raises(typer.BadParameter, match="must be a JSON object"):
        script_of(script)
    assert model_of("openai/x", '{"temperature": 0}', "--user-args") == {
        "llm": "openai/x",
        "llm_args": {"temperature": 0},
    }
    assert model_of(None, "{}", "--user-args") == {}
    with pytest.raises(typer.BadParameter, match="--user-args is no JSON"):
        model_of("x", "{", "--user-args")


def test_a_program_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    import sys

    program = tmp_path / "program.py"
    program.write_text("import json, sys\nprint(json.load(open(sys.argv[1]))['word'])\nraise SystemExit(3)\n")
    with pytest.raises(runs.RunnerFailed, match=r"program.py ended with 3; .*run.log ends:\nhello"):
        runs.run_program(Path(sys.executable), program, {"word": "hello"}, tmp_path / "out", "run.log")
