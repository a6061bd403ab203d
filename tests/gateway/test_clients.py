"""Today's client SDKs, in an environment of their own, against a real gateway on a port."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Stack, Start
from tests.gateway.engine import Answer, Body, FakeEngine

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"


def run(name: str, stack: Stack, *arguments: str) -> Any:
    """Run a client script; its last line of output, read as JSON."""
    command = [str(PYTHON), str(HERE / "clients" / name), f"{stack.url}/v1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def agent(body: Body) -> Answer:
    """Four tool calls, then the answer; tool results are counted in the prompt by the fake's own tokenizer."""
    results = len(body["input_ids"])
    return Answer("", reasoning=f"I have {results} tokens", calls=[("weather", '{"city":"Köln","day":1.0}')])


def play(stack: Stack) -> None:
    count = 0

    def script(body: Body) -> Answer:
        nonlocal count
        count += 1
        return Answer("It is sunny.", reasoning="enough") if count % 5 == 0 else agent(body)

    stack.engine.script = script


FAST = {
    ("openai_loop.py", "streamed", ""),
    ("langchain_loop.py", "whole", ""),
    ("langchain_loop.py", "streamed", "loop-1"),
    ("anthropic_loop.py", "streamed", ""),
    ("responses_loop.py", "streamed", "ids"),
}
LOOPS = [
    pytest.param(script, mode, way, marks=[] if (script, mode, way) in FAST else pytest.mark.long)
    for script, ways in (
        ("openai_loop.py", ("", "loop-1")),
        ("langchain_loop.py", ("", "loop-1")),
        ("anthropic_loop.py", ("", "loop-1")),
        ("responses_loop.py", ("ids", "items")),
    )
    for mode in ("streamed", "whole")
    for way in ways
]


@pytest.mark.parametrize(("script", "mode", "way"), LOOPS)
def test_a_tool_loop_resumes_every_turn(stack: Stack, script: str, mode: str, way: str) -> None:
    play(stack)
    told = run(script, stack, mode, way)
    assert told["final"] == "It is sunny."
    if "states" in told:
        assert [state for state, *_ in told["states"]] == ["new", *["resumed"] * 4]
    requests = stack.engine.requests
    if "counted" in told:
        assert told["counted"] == len(requests[0]["input_ids"])
        assert told["kinds"] == [["thinking", "tool_use"]] * 4 + [["thinking", "text"]]
    if "items" in told:
        assert told["same"]
        assert told["items"] == [["reasoning", "function_call"]] * 4 + [["reasoning", "message"]]
    assert len(requests) == 5
    # The engine's word: one session, each turn on top of the tokens of the one before.
    assert len(stack.engine.sessions) == 1
    assert [FakeEngine.control(r)["epoch"] for r in requests] == [0, 1, 2, 3, 4]  # type: ignore[index]
    for earlier, later in itertools.pairwise(requests):
        assert later["input_ids"][: len(earlier["input_ids"])] == earlier["input_ids"]
    prompt = stack.engine.text(requests[-1])
    assert prompt.count("I have") == 4 and prompt.count("sunny in Köln") == 4


def test_refusals_raise_the_sdks_own_errors_and_are_not_retried(stack: Stack) -> None:
    stack.engine.script = lambda body: Answer("one two three", die_after=1)
    told = run("openai_errors.py", stack)
    assert told["model"] == ["NotFoundError", 404, "model_not_found", True]
    assert told["budget"] == ["BadRequestError", 400, "invalid_budget", True]
    assert told["n"] == ["BadRequestError", 400, "n_not_supported_in_session", True]
    assert told["long"] == ["BadRequestError", 400, "context_length_exceeded", True]
    assert told["stream"] == ["APIError", None, "worker_lost", None]
    assert told["models"] == ["tiny"]
    assert len(stack.engine.requests) == 1
    assert stack.metric('agentkv_requests_total{route="chat_completions"') == 5


def test_parallel_tools_and_structured_output(stack: Stack) -> None:
    def script(body: Body) -> Answer:
        if "structured" in stack.engine.text(body):
            assert body["response_format"]["json_schema"]["strict"] is True
            return Answer('{"name": "Köln", "people": 1000000}')
        return Answer("", calls=[("weather", '{"city":"Köln"}'), ("time", '{"city": "東京"}')])

    stack.engine.script = script
    told = run("openai_more.py", stack)
    assert told["city"] == {"name": "Köln", "people": 1000000}
    assert told["calls"] == [["weather", {"city": "Köln"}], ["time", {"city": "東京"}]]
    assert told["state"] == "resumed"


@pytest.mark.long
def test_a_langgraph_agent_resumes_and_outlasts_silences(start: Start) -> None:
    stack = start(stream={"ping": 0.5})

    def script(body: Body) -> Answer:
        text = stack.engine.text(body)
        if "slow" in text:
            return Answer("done at last", pause=5)
        asked = text.count("<|im_start|>user\nWeather?") + text.count("<|im_start|>user\nAgain?")
        if text.count("sunny in") < asked:
            return Answer("", reasoning="look", calls=[("weather", '{"city":"Köln"}')])
        return Answer("It is sunny.")

    stack.engine.script = script
    told = run("langgraph_agent.py", stack)
    assert told == {"finals": ["It is sunny."] * 2, "slow": "done at last"}
    assert len(stack.engine.requests) == 5
    controls = [FakeEngine.control(r) for r in stack.engine.requests[:4]]
    assert len({c["session"] for c in controls if c}) == 1
    assert stack.metric('agentkv_turns_total{reason="",state="resumed"}') == 3


def test_the_sdk_retries_what_may_succeed_and_nothing_else(start: Start) -> None:
    cases = [(503, 3, ""), (400, 1, ""), (402, 1, 'extra_body={"agentkv": {"token_limit": 5}}')]
    stacks = [start() for _ in cases]
    program = ["import openai", 'm = [{"role": "user", "content": "Hi"}]']
    for stack, (status, _, more) in zip(stacks, cases, strict=True):
        if not more:
            stack.engine.script = lambda body, status=status: Answer(refuse=(status, "no"))  # type: ignore[misc]
        program += [
            "try:",
            f"    c = openai.OpenAI(base_url='{stack.url}/v1', api_key='any', max_retries=2)",
            f"    c.chat.completions.create(model='tiny', messages=m, {more})",
            "except openai.APIStatusError as error:",
            "    print(error.status_code)",
        ]
    command = [str(PYTHON), "-c", "\n".join(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(status) for status, *_ in cases]
    for stack, (status, attempts, _) in zip(stacks, cases, strict=True):
        counted = stack.metric(f'agentkv_requests_total{{route="chat_completions",status="{status}"}}')
        assert counted == attempts
