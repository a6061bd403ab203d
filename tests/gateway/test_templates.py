"""Templates that write the past in other words than the model did: sessions go on from the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentkv_serve.phase_tagger import Label
from tests.gateway.conftest import WEATHER, Stack, Start, tool_result, user
from tests.gateway.engine import Answer, Body, FakeEngine
from tests.gateway.model_folder import TEMPLATE, write_model_folder
from tests.gateway.test_leaving import wait_for

OPENING = "{%- if add_generation_prompt %}<|im_start|>assistant\n"
assert OPENING in TEMPLATE
# Without thinking: an empty block opens the answer, which the template leaves out of the turn later on.
EMPTY_BLOCK = OPENING + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
# The prompt opens the thinking itself, so the model never writes its first marker.
OPEN_BLOCK = OPENING + "<think>\n"

Model = Callable[[str], Path]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Makes a model folder whose answers open in another way."""
    return lambda opening: write_model_folder(tmp_path / "model", TEMPLATE.replace(OPENING, opening))


def labels(stack: Stack) -> list[tuple[str, Label]]:
    """The newest prompt in pieces of one label."""
    body = stack.engine.requests[-1]
    runs = FakeEngine.control(body)["runs"]  # type: ignore[index]
    decode = stack.engine.tokenizer.decode
    triples = zip(runs[::3], runs[1::3], runs[2::3], strict=True)
    return [(decode(body["input_ids"][a:b], skip_special_tokens=False), Label(label)) for a, b, label in triples]


@pytest.mark.parametrize("words", [3, 2000])
def test_an_empty_think_block_in_the_prompt_costs_nothing_later(start: Start, model: Model, words: int) -> None:
    stack = start(model_path=model(EMPTY_BLOCK), routing={"health_interval": 0.05})
    stack.engine.context_length = 1 << 20
    stack.engine.script = lambda body: Answer("word " * words)
    wait_for(lambda: stack.runtime.registry.models() == {"tiny": 1 << 20})
    off: Body = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"}
    messages = [user("Tell")]
    for turn in range(3):
        reply = stack.say(messages, **off)
        assert reply["agentkv"]["state"] == ("resumed" if turn else "new")
        if turn:
            # All but the new message is reused; the template itself would begin anew at the first answer.
            new = f"\n<|im_start|>user\nGo on {turn - 1}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            assert reply["agentkv"]["prefill_tokens"] == len(stack.engine.tokenizer.encode(new).ids)
        messages.append(user(f"Go on {turn}"))
    assert stack.engine.text(stack.engine.requests[-1]).count("<think>\n\n</think>") == 3


def test_a_new_question_after_a_long_tool_loop_is_no_new_session(stack: Stack) -> None:
    messages = [user("Weather?")]
    states = []
    for turn in range(6):
        stack.engine.script = lambda body, turn=turn: Answer("", reasoning=f"step {turn}", calls=[("weather", "{}")])  # type: ignore[misc]
        states.append(stack.say(messages, tools=[WEATHER])["agentkv"]["state"])
        call = messages[-1]["tool_calls"][0]["id"]
        messages[-1] = {k: v for k, v in messages[-1].items() if k != "reasoning_content"}
        messages.append(tool_result(call, f"result {turn}"))
    stack.engine.script = lambda body: Answer("Sunny.")
    states.append(stack.say(messages, tools=[WEATHER])["agentkv"]["state"])
    messages.append(user("Something else"))
    last = stack.say(messages, tools=[WEATHER])
    assert [*states, last["headers"]["x-agentkv-session-state"]] == ["new", *["resumed"] * 7]
    assert last["agentkv"]["prefill_tokens"] < 80 < last["agentkv"]["logical_tokens"]
    assert stack.engine.text(stack.engine.requests[-1]).count("step ") == 6


@pytest.mark.parametrize(("first", "then"), [(True, "resumed"), (False, "rebuilt")])
def test_switching_the_thinking_reuses_only_what_is_equal_and_says_so(
    start: Start, model: Model, first: bool, then: str
) -> None:
    """The prompt is written anew in full; the state goes on if that happens to hold its tokens."""
    stack = start(model_path=model(EMPTY_BLOCK))
    messages = [user("Hi")]
    for turn, thinking in enumerate((first, not first, not first)):
        asked: Body = {"chat_template_kwargs": {"enable_thinking": thinking}}
        told = stack.say(messages, headers={"X-AgentKV-Session": "s"}, **asked)["agentkv"]
        if turn == 1:
            assert (told["state"], told["reason"]) == (then, "history_rewritten" if then == "rebuilt" else None)
            assert stack.metric(f'agentkv_turns_total{{reason="{told["reason"] or ""}",state="{then}"}}') == 1
        messages.append(user("More"))
    assert told["state"] == "resumed"


@pytest.mark.parametrize("streamed", [True, False])
def test_thinking_that_the_prompt_opens_is_thinking(start: Start, model: Model, streamed: bool) -> None:
    stack = start(model_path=model(OPEN_BLOCK))
    stack.engine.script = lambda body: Answer("Hello.", reasoning="hm", opens=False)
    messages = [user("Hi")]
    stack.post(messages, stream=streamed)
    assert FakeEngine.control(stack.engine.requests[0])["decode"]["initial"] == "think"  # type: ignore[index]
    stack.post([*messages, {"role": "assistant", "content": "Hello."}, user("More")], stream=streamed)
    assert ("hm\n</think>", Label.THINK) in labels(stack)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_turn_cut_while_thinking_is_closed_before_the_next(stack: Stack, streamed: bool) -> None:
    stack.engine.script = lambda body: Answer(reasoning="on and on", closes=False, stop=False)
    reply = stack.post([user("Hi")], stream=streamed)
    assert "length" in reply.text and "on and on" in reply.text
    stack.engine.script = lambda body: Answer("Done.")
    message = {"role": "assistant", "content": None, "reasoning_content": "on and on"}
    reply = stack.post([user("Hi"), message, user("Go on")])
    assert reply.json()["usage"]["agentkv"]["state"] == "resumed"
    assert "on and on</think><|im_end|>\n<|im_start|>user\nGo on" in stack.engine.text(stack.engine.requests[1])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_forced_call_is_an_act_from_its_first_token(stack: Stack, choice: str | Body, streamed: bool) -> None:
    stack.engine.script = lambda body: Answer("", calls=[("weather", "{}")])
    reply = stack.post([user("Hi")], tools=[WEATHER], tool_choice=choice, stream=streamed)
    assert '"finish_reason":"tool_calls"' in reply.text
    sent = stack.engine.requests[0]
    assert sent["tool_choice"] == choice
    assert FakeEngine.control(sent)["decode"]["initial"] == "act"  # type: ignore[index]
