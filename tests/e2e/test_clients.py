"""Today's client SDKs against the whole product: `agentkv up` with the default model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentkv_serve.up import AGENT, model_id

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
# Shell lines of the documents that run elsewhere: by `make test` itself and by the fixture below.
SET_UP = {"make setup", "make demo", "make test", ".venv/bin/agentkv up --port 8000"}
NEW = ["new", *["resumed"] * 4]


@dataclass(frozen=True)
class Up:
    """A running `agentkv up`: its base URL and what it printed at the start."""

    url: str
    printed: str


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found.update(children)
        todo += children
    return found


def lasting(pids: set[int], seconds: float = 10) -> list[str]:
    """The command lines of those that still run after a while; what only waits to be reaped does not run."""
    deadline = time.monotonic() + seconds
    while True:
        lines = {pid: command_line(pid) for pid in pids}
        if not any(lines.values()) or time.monotonic() > deadline:
            return [f"{pid}: {line}" for pid, line in lines.items() if line]
        time.sleep(0.1)


def command_line(pid: int) -> str:
    """The command line of a process; empty for a zombie and for none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture(scope="module")
def up(smollm2: Path) -> Iterator[Up]:
    """`agentkv up` in float32, so that a batch of two gives the tokens of a batch of one. Stopped cleanly.

    `AGENTKV_TEST_URL` names one that runs already.
    """
    if running := os.environ.get("AGENTKV_TEST_URL"):
        yield Up(running, AGENT.format(base_url=running, model=model_id(running)))
        return
    command = [sys.executable, "-m", "agentkv_serve", "up", "--model", str(smollm2), "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as it:
        assert it.stdout is not None
        lines: list[str] = []
        for line in it.stdout:
            lines.append(line)
            if line.startswith("print("):  # the last line of the ready-to-paste agent
                break
        printed = "".join(lines)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/v1", printed)
        assert found, printed
        yield Up(found[1], printed)
        children = descendants(it.pid)
        assert len(children) >= 3, "gateway, engine and its scheduler"
        it.send_signal(signal.SIGTERM)
        rest, _ = it.communicate(timeout=60)
        assert it.returncode == 0, rest
        assert not lasting(children), "left behind"


def client(script: str, up: Up, *arguments: str) -> Any:
    """Runs a client script in the clients' environment; returns the JSON that it prints."""
    command = [str(CLIENTS), str(HERE / "clients" / script), f"{up.url}/v1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_loop(told: Any) -> None:
    """Four calls and an answer; every turn after the first resumed on top of the whole turn before."""
    turns = told["turns"]
    assert [turn["state"] for turn in turns] == NEW
    assert len(told["calls"]) >= 4 and told["answer"]
    for before, turn in pairwise(turns):
        assert turn["cached_tokens"] >= before["prompt_tokens"]


@pytest.mark.parametrize(
    ("mode", "session"),
    [
        ("whole", ""),
        ("streamed", "loop"),
        pytest.param("whole", "loop", marks=pytest.mark.long),
        pytest.param("streamed", "", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("script", ["openai_agent.py", "langchain_agent.py"])
def test_a_tool_loop_resumes_every_turn(up: Up, script: str, mode: str, session: str) -> None:
    # Tools whose results differ from test to test: a finished conversation is no prefix of the next test's.
    coldest = str(10 + 20 * len({script, mode} & {"langchain_agent.py"}) + 40 * (mode == "streamed"))
    check_loop(client(script, up, mode, session and f"{session}-{script}-{mode}", coldest))


def test_two_agents_with_identical_beginnings_in_parallel(up: Up) -> None:
    alone = [client("openai_agent.py", up, "whole", f"alone-{coldest}", coldest) for coldest in ("110", "150")]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(client, "openai_agent.py", up, "whole", "", coldest) for coldest in ("110", "150")]
        together = [run.result() for run in runs]
    for reference, told in zip(alone, together, strict=True):
        check_loop(told)
        assert told["calls"] == reference["calls"] and told["answer"] == reference["answer"]


def test_the_printed_agent_runs(up: Up, tmp_path: Path) -> None:
    program = up.printed[up.printed.index("from openai") :]
    assert len(program.splitlines()) == 5
    (tmp_path / "agent.py").write_text(program)
    done = subprocess.run([str(CLIENTS), str(tmp_path / "agent.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "'resumed'" in done.stdout, done.stdout + done.stderr


def blocks(*languages: str) -> list[Any]:
    """The code blocks of the README and the quickstart in these languages, named by file and line."""
    found = []
    for document in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        text = document.read_text()
        for block in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
            if block[1] in languages:
                line = text.count("\n", 0, block.start()) + 1
                found.append(pytest.param(block[1], block[2], id=f"{document.name}-{line}"))
    return found


@pytest.mark.parametrize(("language", "program"), blocks("python", "sh"))
def test_every_block_of_the_documents_is_true(up: Up, language: str, program: str) -> None:
    program = program.replace("http://127.0.0.1:8000", up.url)
    if language == "sh" and "curl" not in program:
        assert set(program.splitlines()) <= SET_UP
        return
    command = [str(CLIENTS), "-c"] if language == "python" else ["bash", "-ec"]
    done = subprocess.run([*command, program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stdout
    assert re.search("resumed|chat.completion|SmolLM2", done.stdout), done.stdout


BAD: dict[str, tuple[dict[str, Any], dict[str, str], int, str]] = {
    "unknown model": ({"model": "gpt-9"}, {}, 404, "model_not_found"),
    "budget -1": ({}, {"X-AgentKV-Budget": "-1"}, 400, "invalid_budget"),
    "budget abc": ({}, {"X-AgentKV-Budget": "abc"}, 400, "invalid_budget"),
    "budget 96": ({}, {"X-AgentKV-Budget": "96"}, 400, "invalid_budget"),
    "budget over the cap": ({}, {"X-AgentKV-Budget": "8193"}, 400, "invalid_budget"),
    "malformed session id": ({}, {"X-AgentKV-Session": "a b"}, 400, "invalid_session_id"),
    "prompt over the limit": ({"content": "word " * 9000}, {}, 400, "context_length_exceeded"),
    "n = 2": ({"n": 2}, {}, 400, "n_not_supported_in_session"),
    "malformed JSON": ({"raw": b'{"model": '}, {}, 400, "invalid_json"),
}


def test_bad_input_leaves_the_session_as_it_was(up: Up) -> None:
    with httpx.Client(base_url=up.url, timeout=120) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        session = {"X-AgentKV-Session": "bad-input"}
        messages: list[dict[str, Any]] = []

        def send(text: str, headers: dict[str, str], **body: Any) -> httpx.Response:
            said = [*messages, {"role": "user", "content": body.pop("content", text)}]
            whole = {"model": model, "messages": said, "max_tokens": 4, "temperature": 0, **body}
            content = body.get("raw") or json.dumps(whole).encode()
            return http.post(
                "/v1/chat/completions",
                content=content,
                headers={"content-type": "application/json", **session, **headers},
            )

        def good(text: str) -> str:
            reply = send(text, {}).raise_for_status().json()
            messages.extend([{"role": "user", "content": text}, reply["choices"][0]["message"]])
            return str(reply["usage"]["agentkv"]["state"])

        assert good("Hello") == "new"
        for name, (body, headers, status, code) in BAD.items():
            reply = send("And?", headers, **body)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (status, code), f"{name}: {reply.text}"
            assert error["message"] and error["type"], name
            assert good(f"Go on after {name}") == "resumed", name
