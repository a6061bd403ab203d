"""The leaderboard's own package against a gateway whose model knows the answers, or fails in known ways."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from agentkv_serve.tasks.bfcl import PACKAGE, UNDECLARED, VECTOR
from agentkv_serve.tasks.commands import register
from agentkv_serve.tasks.environment import environment

from .fake_gateway import Answer, Seen, calls, gateway, text

VENV = Path(".venv-bfcl")
TASKS = [f"multi_turn_base_{number}" for number in range(3)]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[str]]]:
    """The package's ground truth: a list of calls for every turn of a task."""
    python = environment(VENV.resolve(), [PACKAGE, UNDECLARED], Console(quiet=True), python="3.11", without=VECTOR)
    data = next((python.parents[1] / "lib").glob("python*/site-packages/bfcl_eval/data/possible_answer"))
    lines = (data / "BFCL_v4_multi_turn_base.json").read_text().splitlines()[:3]
    return {item["id"]: item["ground_truth"] for item in map(json.loads, lines)}


def spoken(call: dict[str, Any], truth: list[list[str]]) -> dict[str, Any]:
    """What a perfect model says: every call of the turn at once, then a text."""
    if call["messages"][-1]["role"] == "tool":
        return text("done")
    turn = sum(message["role"] == "user" for message in call["messages"]) - 1
    order = {tool["function"]["name"]: list(tool["function"]["parameters"]["properties"]) for tool in call["tools"]}
    made = []
    for written in truth[turn]:
        tree = ast.parse(written, mode="eval").body
        assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)
        arguments = dict(zip(order[tree.func.id], map(ast.literal_eval, tree.args), strict=False))
        arguments |= {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
        made.append((tree.func.id, arguments))
    return calls(*made)


def evaluate(answer: Answer, out: Path, *more: str) -> tuple[dict[str, Any], Seen]:
    """Runs the command against the gateway."""
    app = typer.Typer()
    register(app)
    with gateway(answer) as (url, seen):
        arguments = ["bfcl", "--base-url", url, "--limit", "3", "--budget", "512", "--out", str(out), "--json", *more]
        done = CliRunner().invoke(app, [*arguments, "--venv", str(VENV)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), seen


@pytest.mark.long
def test_a_model_that_knows_the_answers_solves_every_task(answers: dict[str, list[list[str]]], tmp_path: Path) -> None:
    def answer(call: dict[str, Any]) -> dict[str, Any]:
        question = next(m["content"] for m in call["messages"] if m["role"] == "user")
        return spoken(call, answers[task_of[question]])

    data = next((VENV / "lib").glob("python*/site-packages/bfcl_eval/data"))
    items = map(json.loads, (data / "BFCL_v4_multi_turn_base.json").read_text().splitlines()[:3])
    task_of = {item["question"][0][0]["content"]: item["id"] for item in items}
    result, seen = evaluate(answer, tmp_path)
    for row in result["rows"]:
        assert (row["tasks"], row["score"], row["errors"], row["overtime"]) == (3, 1.0, 0, 0)
        assert row["later_turns_resumed"] == row["later_turns"] > 0 and row["sessions"] == 3
    expected = {f"bfcl.{name}.{task}" for name in ("full", "agentkv-512") for task in TASKS}
    assert seen.sessions() == expected and set(seen.released) == expected
    budgets = {(headers["x-agentkv-policy"], headers["x-agentkv-budget"]) for headers, _ in seen.calls}
    assert budgets == {("full", "full"), ("agentkv", "512")}

    again, seen = evaluate(answer, tmp_path)
    assert not seen.calls, "what is done is not done again"
    assert again["rows"] == result["rows"]


@pytest.mark.long
def test_errors_and_overtime_are_told_apart(answers: dict[str, list[list[str]]], tmp_path: Path) -> None:
    def answer(call: dict[str, Any]) -> dict[str, Any]:
        seen.append(1)
        if len(seen) % 3 == 1:
            return {}
        if len(seen) % 3 == 2:
            time.sleep(2)
        return text("I cannot.")

    seen: list[int] = []
    result, _ = evaluate(answer, tmp_path, "--task-seconds", "1", "--max-tokens", "5")
    for row in result["rows"]:
        assert row["score"] == 0 and row["tasks"] == 3
        assert row["errors"] >= 1 and row["overtime"] >= 1
        assert all("the model fell over" in words for words in row["error_texts"])

    again, calls_made = evaluate(lambda call: text("I cannot."), tmp_path)
    assert calls_made.sessions(), "a task that the harness failed is run again"
    for row, before in zip(again["rows"], result["rows"], strict=True):
        assert (row["errors"], row["overtime"]) == (0, before["overtime"])


@pytest.mark.long
@pytest.mark.engine
def test_a_task_runs_on_the_real_gateway_and_engine(tmp_path: Path) -> None:
    """The small model solves nothing; every task is one session all the same, and each later turn finds its state."""
    app = typer.Typer()
    register(app)
    arguments = ["bfcl", "--limit", "1", "--budget", "512", "--max-tokens", "16", "--task-seconds", "200", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--venv", str(VENV)])
    assert done.exit_code == 0, done.output
    full, ours = json.loads(done.stdout)["rows"]
    for row in (full, ours):
        assert (row["tasks"], row["errors"], row["overtime"], row["sessions"]) == (1, 0, 0, 1), row["error_texts"]
        assert row["later_turns_resumed"] == row["later_turns"] >= 3
    assert full["turns_compressed"] == 0 and ours["turns_compressed"] == ours["turns"]
    assert ours["kv_tokens_max"] <= 512 < full["kv_tokens_max"]
