"""Runs tasks of tau2-bench by its own orchestrator, one gateway session per task. Its code is used as it is.

A program of the benchmark's own environment: it is run as a file there, and imports nothing of ours. Its argument is a
JSON file:

    {"base_url": …, "key": …, "model": …, "out": folder, "domains": […], "split": name of a task split,
     "tasks": ids or null, "limit": tasks per domain or null, "max_tokens": per reply or null, "task_seconds": …,
     "max_steps": …, "seed": …, "user": {"llm": …, "llm_args": {…}} or {"script": {task id or "*": [text, …]}},
     "judge": {"llm": …, "llm_args": {…}} or null,
     "settings": [{"name": …, "policy": …, "budget": number or "full"}]}

Per setting it writes `out/NAME.json` (every task's outcome), `out/NAME.turns.jsonl` and the conversations. Tasks with
an outcome are not run again, unless the harness had failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tau2.agent.base_agent import AgentError  # type: ignore[import-not-found]
from tau2.data_model.message import AssistantMessage, UserMessage  # type: ignore[import-not-found]
from tau2.data_model.tasks import RewardType  # type: ignore[import-not-found]
from tau2.evaluator import evaluator_nl_assertions  # type: ignore[import-not-found]
from tau2.orchestrator.orchestrator import Orchestrator  # type: ignore[import-not-found]
from tau2.registry import registry  # type: ignore[import-not-found]
from tau2.runner.build import build_agent, build_environment, build_user  # type: ignore[import-not-found]
from tau2.runner.simulation import run_simulation  # type: ignore[import-not-found]
from tau2.user.user_simulator import UserSimulator  # type: ignore[import-not-found]
from tau2.user.user_simulator_base import STOP  # type: ignore[import-not-found]

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
OUT = Path(SPEC["out"])
MODEL_FAILURES = (AgentError, AssertionError, json.JSONDecodeError)
"""What the benchmark raises when a model's reply is empty or its arguments are no JSON: the task failed."""


class ScriptedUser(UserSimulator):  # type: ignore[misc]
    """A user whose lines are given beforehand, so that a run needs no second model."""

    lines: list[str]

    def _generate_next_message(self, message: Any, state: Any) -> Any:
        said = sum(isinstance(earlier, UserMessage) for earlier in state.messages)
        return UserMessage(role="user", content=self.lines[said] if said < len(self.lines) else STOP, cost=0.0)


def session_of(setting: dict[str, Any], task: str) -> str:
    """The session id of a task, in the characters that one may have."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", f"tau2.{setting['name']}.{task}")
    return f"{plain[:150]}.{hashlib.sha256(task.encode()).hexdigest()[:12]}"


def release(session: str) -> None:
    """Tells the gateway that the session is over; it does not mind one that never began."""
    request = urllib.request.Request(
        f"{SPEC['base_url']}/v1/agentkv/sessions/{urllib.parse.quote(session, safe='')}/release",
        method="POST",
        headers={"authorization": f"Bearer {SPEC['key']}"},
    )
    urllib.request.urlopen(request, timeout=30).close()


def llm(session: str, policy: str, budget: int | str) -> tuple[str, dict[str, Any]]:
    """The litellm model name and arguments of a session on the gateway."""
    headers = {"x-agentkv-session": session, "x-agentkv-policy": policy, "x-agentkv-budget": str(budget)}
    arguments: dict[str, Any] = {"api_base": f"{SPEC['base_url']}/v1", "api_key": SPEC["key"], "temperature": 0.0}
    arguments |= {"extra_headers": headers, "timeout": SPEC["task_seconds"], "num_retries": 0, "max_retries": 0}
    return f"openai/{SPEC['model']}", arguments | ({"max_tokens": SPEC["max_tokens"]} if SPEC["max_tokens"] else {})


def user_for(environment: Any, task: Any, session: str) -> Any:
    """The user of a task: scripted, or a model (by default the served one, with everything kept)."""
    user = SPEC["user"]
    if script := user.get("script"):
        scripted = build_user("scripted_user", environment, task, llm="none", llm_args={})
        scripted.lines = script.get(task.id, script.get("*", []))
        return scripted
    name, arguments = (user["llm"], user["llm_args"]) if user.get("llm") else llm(f"{session}.user", "full", "full")
    return build_user("user_simulator", environment, task, llm=name, llm_args=arguments)


def run(setting: dict[str, Any], domain: str, task: Any) -> dict[str, Any]:
    """Plays one task. Returns its outcome and the turns' notes."""
    name, session = f"{domain}/{task.id}", session_of(setting, f"{domain}.{task.id}")
    environment = build_environment(domain)
    model, arguments = llm(session, setting["policy"], setting["budget"])
    agent = build_agent("llm_agent", environment, llm=model, llm_args=arguments, task=task)
    orchestrator = Orchestrator(
        domain=domain,
        agent=agent,
        user=user_for(environment, task, session),
        environment=environment,
        task=task,
        max_steps=SPEC["max_steps"],
        seed=SPEC["seed"],
        timeout=SPEC["task_seconds"],
    )
    outcome: dict[str, Any] = {"task": name, "valid": False, "why": None, "overtime": False, "error": "", "turns": []}
    if needs_judge(task) and not SPEC["judge"] and "OPENAI_API_KEY" not in os.environ:
        return outcome | {"error": "its score needs a judge model: give --judge-llm"}
    began = time.monotonic()
    messages: list[Any] = []
    try:
        simulation = run_simulation(orchestrator)
        messages = simulation.messages
        reward = simulation.reward_info.reward
        ended = simulation.termination_reason.value
        outcome |= {"valid": reward > 1 - 1e-6, "reward": reward, "why": ended, "overtime": ended == "timeout"}
    except MODEL_FAILURES as failure:
        outcome["why"] = f"{type(failure).__name__}: {failure}"[:300]
    except Exception as error:  # whatever a task ends with, the others go on
        late = time.monotonic() - began >= SPEC["task_seconds"]
        outcome |= {"overtime": late, "error": "" if late else f"{type(error).__name__}: {error}"[:1000]}
    finally:
        release(session)
        release(f"{session}.user")
    messages = messages or orchestrator.trajectory
    outcome["messages"] = len(messages)
    outcome["turns"] = [
        {"task": name, "completion_tokens": usage.get("completion_tokens"), **(usage.get("agentkv") or {})}
        for message in messages
        if isinstance(message, AssistantMessage) and message.raw_data
        for usage in [message.raw_data.get("usage") or {}]
    ]
    conversations = OUT / "conversations" / setting["name"]
    conversations.mkdir(parents=True, exist_ok=True)
    (conversations / f"{domain}.{task.id[:100].replace('/', '.')}.json").write_text(
        json.dumps([message.model_dump(mode="json", exclude={"raw_data"}) for message in messages], indent=1)
    )
    return outcome


def needs_judge(task: Any) -> bool:
    """Whether a part of the task's score is a model's judgement of the conversation."""
    criteria = task.evaluation_criteria
    return bool(criteria and criteria.nl_assertions and RewardType.NL_ASSERTION in criteria.reward_basis)


def tasks_of(domain: str) -> list[Any]:
    """The domain's tasks that are asked for, in the benchmark's order."""
    tasks = registry.get_tasks_loader(domain)(SPEC["split"])
    if SPEC["tasks"]:
        tasks = [task for task in tasks if task.id in SPEC["tasks"]]
    return list(tasks[: SPEC["limit"]])


def main() -> None:
    """All settings and domains, one task after the other."""
    registry.register_user(ScriptedUser, "scripted_user")
    if judge := SPEC["judge"]:
        evaluator_nl_assertions.DEFAULT_LLM_NL_ASSERTIONS = judge["llm"]
        evaluator_nl_assertions.DEFAULT_LLM_NL_ASSERTIONS_ARGS = judge["llm_args"]
    for setting in SPEC["settings"]:
        journal = OUT / f"{setting['name']}.outcomes.jsonl"
        done = {}
        if journal.is_file():
            told = map(json.loads, journal.read_text().splitlines())
            done = {outcome["task"]: outcome for outcome in told if not outcome["error"]}
        for domain in SPEC["domains"]:
            for task in tasks_of(domain):
                if f"{domain}/{task.id}" not in done:
                    outcome = done[f"{domain}/{task.id}"] = run(setting, domain, task)
                    with journal.open("a") as lines:
                        lines.write(json.dumps(outcome) + "\n")
        turns = [json.dumps(turn) for outcome in done.values() for turn in outcome["turns"]]
        (OUT / f"{setting['name']}.turns.jsonl").write_text("".join(f"{turn}\n" for turn in turns))
        (OUT / f"{setting['name']}.json").write_text(json.dumps(list(done.values()), indent=1))


if __name__ == "__main__":
    main()
