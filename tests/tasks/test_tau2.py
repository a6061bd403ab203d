"""tau2-bench's own orchestrator, with a scripted user, against a gateway whose model transfers the user.

Needs a checkout of tau2-bench: AGENTKV_TAU2 names it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from agentkv_serve.tasks.commands import register

from .fake_gateway import Answer, Seen, calls, gateway, text

CHECKOUT = os.environ.get("AGENTKV_TAU2", "")
VENV = os.environ.get("AGENTKV_TAU2_VENV", ".venv-tau2")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not CHECKOUT, reason="AGENTKV_TAU2 names no checkout of tau2-bench"),
]
SPLIT = {"airline": "base", "retail": "base", "telecom": "small"}


def evaluate(answer: Answer, out: Path, domain: str, *more: str) -> tuple[dict[str, Any], Seen]:
    """Runs one task of a domain by the command."""
    app = typer.Typer()
    register(app)
    script = out / "script.json"
    script.write_text(json.dumps({"*": ["I need help with my booking.", "Thanks.", "###STOP###"]}))
    with gateway(answer) as (url, seen):
        arguments = [
            "tau2",
            "--venv",
            VENV,
            "--path",
            CHECKOUT,
            "--base-url",
            url,
            "--domain",
            domain,
            "--split",
            SPLIT[domain],
        ]
        arguments += ["--limit", "1", "--budget", "512", "--out", str(out), "--user-script", str(script), "--json"]
        done = CliRunner().invoke(app, [*arguments, *more])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), seen


def transfers(call: dict[str, Any]) -> dict[str, Any]:
    """Asks once, then hands the user over, then says so."""
    last = call["messages"][-1]
    if last["role"] == "tool":
        return text("You are being transferred to a human agent.")
    if sum(message["role"] == "user" for message in call["messages"]) == 1:
        return text("What is your user id?")
    return calls(("transfer_to_human_agents", {"summary": "The user needs help."}))


@pytest.mark.parametrize("domain", sorted(SPLIT))
def test_the_orchestrator_plays_a_task_through_the_gateway(domain: str, tmp_path: Path) -> None:
    result, seen = evaluate(transfers, tmp_path, domain)
    for row in result["rows"]:
        assert (row["tasks"], row["errors"], row["overtime"]) == (1, 0, 0), row["error_texts"]
        assert (row["turns"], row["later_turns_resumed"], row["sessions"]) == (3, 2, 1)
    assert len(seen.sessions()) == 2 and seen.sessions() <= set(seen.released)
    budgets = {(headers["x-agentkv-policy"], headers["x-agentkv-budget"]) for headers, _ in seen.calls}
    assert budgets == {("full", "full"), ("agentkv", "512")}
    first = seen.calls[0][1]
    assert first["messages"][0]["role"] == "system" and len(first["messages"][0]["content"]) > 3000
    assert "transfer_to_human_agents" in {tool["function"]["name"] for tool in first["tools"]}
    told = [json.loads(line) for line in (tmp_path / "full.outcomes.jsonl").read_text().splitlines()]
    assert told[0]["why"] == "user_stop" and "reward" in told[0]

    _, again = evaluate(transfers, tmp_path, domain)
    assert not again.calls, "what is done is not done again"


def test_a_task_whose_gold_actions_are_none_is_solved_by_changing_nothing(tmp_path: Path) -> None:
    result, _ = evaluate(lambda call: text("I cannot cancel it."), tmp_path, "airline", "--task", "0")
    assert [row["score"] for row in result["rows"]] == [1.0, 1.0]


def test_a_models_broken_arguments_fail_the_task_and_not_the_harness(tmp_path: Path) -> None:
    def broken(call: dict[str, Any]) -> dict[str, Any]:
        made = calls(("transfer_to_human_agents", {}))
        made["tool_calls"][0]["function"]["arguments"] = '{"summary": '
        return made

    result, _ = evaluate(broken, tmp_path, "airline")
    assert [(row["score"], row["errors"]) for row in result["rows"]] == [(0.0, 0), (0.0, 0)]
    told = json.loads((tmp_path / "full.json").read_text())
    assert told[0]["why"].startswith("JSONDecodeError")


def test_an_error_of_the_server_is_an_error_of_the_run(tmp_path: Path) -> None:
    result, _ = evaluate(lambda call: {}, tmp_path, "airline")
    assert [row["errors"] for row in result["rows"]] == [1, 1]
    again, _ = evaluate(transfers, tmp_path, "airline")
    assert [(row["tasks"], row["errors"]) for row in again["rows"]] == [(1, 0), (1, 0)], "it is run again"
