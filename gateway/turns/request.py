"""A chat request, checked and taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentkv_serve.gateway.errors import bad_request
from agentkv_serve.gateway.sessions.meaning import text_of
from agentkv_serve.gateway.settings import LimitSettings
from agentkv_serve.gateway.upstream.bodies import CLIENT_FIELDS, COMPLETION_FIELDS, REFUSED_FIELDS
from agentkv_serve.gateway.upstream.client import CHAT, COMPLETIONS

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_FLAGS = (
    "stream",
    "logprobs",
    "parallel_tool_calls",
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
    "separate_reasoning",
    "stream_reasoning",
    "continue_final_message",
)


@dataclass(slots=True)
class ChatRequest:
    """What the gateway knows of a chat completion request. `sampling` goes to the engine as it is.

    `alone` says why the request cannot be a turn of a session, or is "". `path` is the engine's endpoint; `payload`
    stands in for `messages` where the client sent no chat.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    sampling: dict[str, Any]
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    alone: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    path: str = CHAT
    payload: dict[str, Any] = field(default_factory=dict)


def read_chat(body: Any, limits: LimitSettings) -> ChatRequest:
    """Check a request body. Raises 400 that names the field; what only the engine can judge is left to it."""
    body = _checked(body)
    sampling = {k: v for k, v in body.items() if k in CLIENT_FIELDS and v is not None}
    return ChatRequest(
        model=_model(body),
        messages=_messages(body.get("messages"), limits),
        tools=_tools(body.get("tools"), limits),
        template_kwargs=_template_kwargs(body),
        sampling=sampling,
        stream=bool(body.get("stream")),
        include_usage=_include_usage(body),
        max_tokens=_max_tokens(body),
        alone=_alone(body),
        body=body,
    )


def read_completion(body: Any) -> ChatRequest:
    """Check the body of a text completion. Raw prompts have no turns, so they always run without a session."""
    body = _checked(body)
    prompt = body.get("prompt")
    lists = isinstance(prompt, list) and bool(prompt)
    if not isinstance(prompt, str) and not lists:
        raise bad_request("prompt must be a text, token ids, or a list of such prompts.", param="prompt")
    best_of = body.get("best_of")
    reasons = (
        ("n", _several(body)),
        ("best_of", best_of not in (None, 1)),
        ("beam_search", bool(body.get("use_beam_search"))),
        ("echo", bool(body.get("echo"))),
        ("prompt_list", lists),
        ("raw_prompt", True),
    )
    return ChatRequest(
        model=_model(body),
        messages=[],
        tools=[],
        template_kwargs={},
        sampling={k: v for k, v in body.items() if k in COMPLETION_FIELDS and v is not None},
        stream=bool(body.get("stream")),
        include_usage=_include_usage(body),
        max_tokens=_max_tokens(body),
        alone=next(reason for reason, holds in reasons if holds),
        body=body,
        path=COMPLETIONS,
        payload={"prompt": prompt},
    )


def _checked(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise bad_request("The body must be a JSON object.")
    refused = sorted(REFUSED_FIELDS & {name for name, value in body.items() if value is not None})
    if refused:
        raise bad_request(
            f"The field {refused[0]!r} is not open to clients.", param=refused[0], code="field_not_allowed"
        )
    for name in _FLAGS:
        if name == "logprobs" and "prompt" in body:
            continue
        if not isinstance(body.get(name), bool | None):
            raise bad_request(f"{name} must be true or false.", param=name)
    return body


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if not isinstance(options, dict | None):
        raise bad_request("stream_options must be an object.", param="stream_options")
    return bool((options or {}).get("include_usage"))


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("model must name a served model; see GET /v1/models.", param="model")
    return model


def _messages(messages: Any, limits: LimitSettings) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with at least one message.", param="messages")
    if len(messages) > limits.messages:
        raise bad_request(f"More than {limits.messages} messages.", param="messages")
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]")
    return messages


def _check_message(message: Any, at: str) -> None:
    if not isinstance(message, dict):
        raise bad_request(f"{at} must be an object.", param=at)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{at}.role must be one of {', '.join(sorted(ROLES))}.", param=f"{at}.role")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise bad_request(f"{at}.content must be a string, a list of parts or null.", param=f"{at}.content")
    if isinstance(content, list):
        for j, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise bad_request(f"{at}.content[{j}] must be a part with a type.", param=f"{at}.content")
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise bad_request(f"{at}.content[{j}].text must be a string.", param=f"{at}.content")
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None):
        raise bad_request(f"{at}.tool_calls must be a list.", param=f"{at}.tool_calls")
    for j, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{at}.tool_calls[{j}] must have a function with a name.", param=f"{at}.tool_calls")
    for name in ("reasoning_content", "reasoning", "name", "tool_call_id"):
        if name in ("name", "tool_call_id") and not isinstance(message.get(name), str | None):
            raise bad_request(f"{at}.{name} must be a string.", param=f"{at}.{name}")


def _tools(tools: Any, limits: LimitSettings) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > limits.tools:
        raise bad_request(f"tools must be a list of at most {limits.tools} tools.", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"tools[{i}] must be a function tool with a name.", param=f"tools[{i}]")
        if not isinstance(function.get("parameters"), dict | None):
            raise bad_request(f"tools[{i}].function.parameters must be an object.", param=f"tools[{i}]")
    return tools


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """What SGLang gives the chat template for these fields; the gateway's rendering must see the same."""
    given = body.get("chat_template_kwargs")
    if not isinstance(given, dict | None):
        raise bad_request("chat_template_kwargs must be an object.", param="chat_template_kwargs")
    if given and "chat_template" in given:
        raise bad_request("A request cannot bring its own chat template.", param="chat_template_kwargs")
    kwargs = dict(given or {})
    effort, reasoning = body.get("reasoning_effort"), body.get("reasoning")
    if not isinstance(reasoning, dict | None):
        raise bad_request("reasoning must be an object.", param="reasoning")
    if reasoning:
        effort = reasoning.get("effort", effort)
    if not isinstance(effort, str | int | float | None) or isinstance(effort, bool):
        raise bad_request("reasoning_effort must be a level or a number.", param="reasoning_effort")
    if effort is not None:
        kwargs.setdefault("thinking", effort != "none")
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs.setdefault("reasoning_effort", effort)
    elif reasoning and (reasoning.get("enabled") or reasoning.get("enable")):
        kwargs.setdefault("thinking", True)
        kwargs.setdefault("enable_thinking", True)
    return kwargs


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    limit = None
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad_request(f"{name} must be a positive integer.", param=name)
        limit = value
    return limit


def _several(body: Mapping[str, Any]) -> bool:
    n = body.get("n")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 128):
        raise bad_request("n must be an integer from 1 to 128.", param="n")
    return n is not None and n > 1


def _alone(body: Mapping[str, Any]) -> str:
    if _several(body):
        return "n"
    if body.get("use_beam_search"):
        return "beam_search"
    if body.get("continue_final_message"):
        return "continue_final_message"
    # The ledger holds text tokens; what stands for an image is made inside the engine.
    contents = [message.get("content") for message in body["messages"]]
    if any(text_of(content) is None for content in contents):
        return "media"
    return ""
