"""Runs tasks of the Berkeley Function-Calling Leaderboard by its own package, one gateway session per task.

A program of the benchmark's own environment: it is run as a file there, and imports nothing of ours. Its argument is a
JSON file:

    {"base_url": …, "key": …, "model": …, "out": folder, "categories": […], "limit": tasks per category or null,
     "max_tokens": per call or null, "task_seconds": …, "parallel": …,
     "settings": [{"name": …, "policy": …, "budget": number or "full"}]}

Per setting it writes `out/NAME.json` (every task's outcome) and, as they happen, `out/NAME.turns.jsonl`. What is done
already is not done again (the package keeps its results under `out/result`), unless the harness had failed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) == 2 else {}
OUT = Path(SPEC.get("out", "."))
# Read by the package and by the OpenAI client when they are imported.
os.environ |= {
    "BFCL_PROJECT_ROOT": str(OUT),
    "OPENAI_BASE_URL": f"{SPEC.get('base_url', '')}/v1",
    "OPENAI_API_KEY": SPEC.get("key") or "any",
    "TOKENIZERS_PARALLELISM": "false",
}

from bfcl_eval import _llm_response_generation as generation  # type: ignore[import-not-found]  # noqa: E402
from bfcl_eval.constants.category_mapping import VERSION_PREFIX  # type: ignore[import-not-found]  # noqa: E402
from bfcl_eval.constants.model_config import (  # type: ignore[import-not-found]  # noqa: E402
    MODEL_CONFIG_MAPPING,
    ModelConfig,
)
from bfcl_eval.eval_checker import eval_runner  # type: ignore[import-not-found]  # noqa: E402
from bfcl_eval.model_handler.api_inference.openai_completion import (  # type: ignore[import-not-found]  # noqa: E402
    OpenAICompletionsHandler,
)
from bfcl_eval.utils import load_dataset_entry, parse_test_category_argument  # type: ignore[import-not-found]  # noqa: E402

OVERTIME = "the task ran out of its time"
_lock = threading.Lock()


class GatewayHandler(OpenAICompletionsHandler):  # type: ignore[misc]
    """The package's own function-calling client; it only says which session a call belongs to, and caps it."""

    @property
    def setting(self) -> dict[str, Any]:
        """What this client runs with."""
        return next(setting for setting in SPEC["settings"] if registry_name(setting) == self.registry_name)

    def _build_client_kwargs(self) -> dict[str, Any]:
        return {**super()._build_client_kwargs(), "max_retries": 0}  # a second try would hide an error

    def inference(self, test_entry: dict[str, Any], *args: Any) -> Any:
        """One task, in a session of its own that is released afterwards."""
        try:
            return super().inference(test_entry, *args)
        finally:
            release(session_of(self.setting, test_entry["id"]))

    def _pre_query_processing_FC(self, inference_data: dict[str, Any], test_entry: dict[str, Any]) -> dict[str, Any]:
        data: dict[str, Any] = super()._pre_query_processing_FC(inference_data, test_entry)
        return data | {"task": test_entry["id"], "deadline": time.monotonic() + SPEC["task_seconds"]}

    def _query_FC(self, inference_data: dict[str, Any]) -> Any:
        left = inference_data["deadline"] - time.monotonic()
        if left <= 0:
            raise TimeoutError(OVERTIME)
        task = inference_data["task"]
        headers = {"x-agentkv-session": session_of(self.setting, task)}
        headers |= {"x-agentkv-budget": str(self.setting["budget"]), "x-agentkv-policy": self.setting["policy"]}
        call: dict[str, Any] = {"messages": inference_data["message"], "model": self.model_name}
        call |= {"temperature": self.temperature, "extra_headers": headers, "timeout": left}
        call |= {"tools": inference_data["tools"]} if inference_data["tools"] else {}
        call |= {"max_tokens": SPEC["max_tokens"]} if SPEC["max_tokens"] else {}
        inference_data["inference_input_log"] = {"message": repr(call["messages"]), "tools": inference_data["tools"]}
        began = time.monotonic()
        try:
            reply = self.client.chat.completions.create(**call)
        except Exception:  # whatever ended a call past the task's deadline, the task failed by its time
            if time.monotonic() >= inference_data["deadline"]:
                raise TimeoutError(OVERTIME) from None
            raise
        seconds = time.monotonic() - began
        usage = reply.usage.model_dump()
        note = {"task": task, "seconds": round(seconds, 3), "finish": reply.choices[0].finish_reason}
        note |= {"calls": len(reply.choices[0].message.tool_calls or ())}
        note |= {"completion_tokens": usage["completion_tokens"], **(usage.get("agentkv") or {})}
        with _lock, (OUT / f"{self.setting['name']}.turns.jsonl").open("a") as lines:
            lines.write(json.dumps(note) + "\n")
        return reply, seconds


def registry_name(setting: dict[str, Any]) -> str:
    """The package's name of a setting; it takes an underscore for a slash."""
    return f"agentkv-serve-{setting['name']}".replace("_", "-")


def session_of(setting: dict[str, Any], task: str) -> str:
    """The session id of a task."""
    return f"bfcl.{setting['name']}.{task}"


def release(session: str) -> None:
    """Tells the gateway that the session is over; it does not mind one that never began."""
    request = urllib.request.Request(
        f"{SPEC['base_url']}/v1/agentkv/sessions/{urllib.parse.quote(session, safe='')}/release",
        method="POST",
        headers={"authorization": f"Bearer {SPEC.get('key') or 'any'}"},
    )
    urllib.request.urlopen(request, timeout=30).close()


def chosen(categories: list[str], limit: int | None) -> list[dict[str, Any]]:
    """The first `limit` tasks of each category, with the conversations that a memory task builds on."""
    entries = []
    for category in categories:
        every = load_dataset_entry(category)
        tasks = [entry for entry in every if "prereq" not in entry["id"]][:limit]
        needed = {before for task in tasks for before in task.get("depends_on", [])}
        while more := {b for e in every if e["id"] in needed for b in e.get("depends_on", [])} - needed:
            needed |= more
        entries += [entry for entry in every if entry["id"] in needed] + tasks
    return entries


def run(setting: dict[str, Any], categories: list[str]) -> None:
    """Generates what is missing, has the package score it, and writes every task's outcome."""
    name = registry_name(setting)
    MODEL_CONFIG_MAPPING[name] = ModelConfig(
        model_name=SPEC["model"],
        display_name=name,
        url="",
        org="",
        license="",
        model_handler=GatewayHandler,
        is_fc_model=True,
        underscore_to_dot=False,
    )
    args = SimpleNamespace(
        temperature=0.001,
        num_threads=SPEC["parallel"],
        include_input_log=False,
        exclude_state_log=True,
        result_dir=OUT / "result",
        run_ids=False,
        allow_overwrite=False,
    )
    entries = chosen(categories, SPEC["limit"])
    tasks = [entry["id"] for entry in entries if "prereq" not in entry["id"]]
    forget_unfinished(setting, name)
    missing = generation.collect_test_cases(args, name, categories, entries)
    if missing:
        generation.generate_results(args, name, missing)
    # A folder per setting: the package's table of scores wants to know every model that it finds beside it.
    shutil.rmtree(OUT / "score" / name, ignore_errors=True)
    eval_runner.main([name], categories, args.result_dir, OUT / "score" / name, partial_eval=True)
    (OUT / f"{setting['name']}.json").write_text(json.dumps(outcomes(name, set(tasks)), indent=1))


def files_of(name: str) -> list[Path]:
    """The package's result files of a setting."""
    return sorted((OUT / "result" / name).rglob(f"{VERSION_PREFIX}_*_result.json"))


def broke(result: dict[str, Any]) -> str:
    """What ended a task before its end; empty where nothing did."""
    mark = "Error during inference: "
    text = result["result"]
    return text.removeprefix(mark) if isinstance(text, str) and text.startswith(mark) else ""


def forget_unfinished(setting: dict[str, Any], name: str) -> None:
    """Drops the results of tasks that ended with an error of the harness, and the notes of those and of tasks that an
    earlier run did not bring to their end: they begin anew."""
    done = set()
    for path in files_of(name):
        results = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [result for result in results if broke(result) in ("", OVERTIME)]
        path.write_text("".join(json.dumps(result) + "\n" for result in kept))
        done |= {result["id"] for result in kept}
    notes = OUT / f"{setting['name']}.turns.jsonl"
    if notes.is_file():
        lines = notes.read_text().splitlines(keepends=True)
        notes.write_text("".join(line for line in lines if json.loads(line)["task"] in done))


def outcomes(name: str, tasks: set[str]) -> list[dict[str, Any]]:
    """Every task's result, by the package's own files: whether it was right, and what went wrong if it did not run."""
    failed: dict[str, str] = {}
    for path in (OUT / "score" / name).rglob(f"{VERSION_PREFIX}_*_score.json"):
        for line in path.read_text().splitlines()[1:]:  # the first one is the summary
            entry = json.loads(line)
            error = entry.get("error")
            failed[entry["id"]] = str(error.get("error_type", "")) if isinstance(error, dict) else str(error)
    found = []
    for entry in (json.loads(line) for path in files_of(name) for line in path.read_text().splitlines()):
        if entry["id"] in tasks:
            outcome = {"task": entry["id"], "valid": entry["id"] not in failed, "why": failed.get(entry["id"])}
            ended = broke(entry)
            outcome |= {"overtime": ended == OVERTIME, "error": ended if ended != OVERTIME else ""}
            found.append(outcome)
    return found


def main() -> None:
    """All settings, one after the other."""
    categories = parse_test_category_argument(SPEC["categories"])
    for setting in SPEC["settings"]:
        run(setting, categories)


if __name__ == "__main__":
    main()
