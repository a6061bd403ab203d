"""Anthropic's Messages API over chat turns."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentkv_serve.gateway.dialects.dialect import Json
from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.turns.turn import Turn
from agentkv_serve.gateway.upstream.frames import payload_of

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
_PASSED = ("temperature", "top_p", "top_k", "stream", "agentkv", "metadata", "session_id")


def error_body(error: ApiError) -> Json:
    """An error in Anthropic's shape."""
    kind = _ERRORS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message, "code": error.code}}


def chat_body(body: Any) -> Json:
    """A Messages request as a chat request. Raises 400 that names the field."""
    if not isinstance(body, dict):
        raise bad_request("The body must be a JSON object.")
    messages = _system(body.get("system"))
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise bad_request("messages must be a list with at least one message.", param="messages")
    for i, message in enumerate(given):
        messages += _message(message, f"messages[{i}]")
    chat: Json = {name: body[name] for name in _PASSED if body.get(name) is not None}
    chat |= {"model": body.get("model"), "messages": messages, "max_tokens": body.get("max_tokens")}
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if body.get("tools"):
        chat["tools"] = _tools(body["tools"])
        chat |= _tool_choice(body.get("tool_choice"))
    thinking = body.get("thinking")
    if isinstance(thinking, dict):
        enabled = thinking.get("type") != "disabled"
        chat["chat_template_kwargs"] = {"enable_thinking": enabled, "thinking": enabled}
    return chat


def _system(system: Any) -> list[Json]:
    if system is None or system == "":
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    return [{"role": "system", "content": _text(_blocks(system, "system"), "system")}]


def _blocks(content: Any, at: str) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(b, dict) for b in content):
        raise bad_request(f"{at} must be a string or a list of blocks.", param=at)
    return content


def _text(blocks: Sequence[Json], at: str) -> str:
    texts = []
    for block in blocks:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise bad_request(f"{at} may only hold text blocks.", param=at)
        texts.append(block["text"])
    return "\n".join(texts)


def _message(message: Any, at: str) -> list[Json]:
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise bad_request(f"{at} must be an object with the role user or assistant.", param=at)
    blocks = _blocks(message.get("content"), f"{at}.content")
    return _assistant(blocks, at) if message["role"] == "assistant" else _user(message["role"], blocks, at)


def _user(role: str, blocks: Sequence[Json], at: str) -> list[Json]:
    messages: list[Json] = []
    parts: list[Json] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            call = block.get("tool_use_id")
            if not isinstance(call, str):
                raise bad_request(f"{at}: a tool_result needs its tool_use_id.", param=at)
            inner = _blocks(block.get("content") or "", f"{at}.tool_result")
            text = _text(inner, f"{at}.tool_result")
            messages.append({"role": "tool", "tool_call_id": call, "content": text})
        elif kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and isinstance(block.get("source"), dict):
            parts.append({"type": "image_url", "image_url": {"url": _image_url(block["source"])}})
        else:
            raise bad_request(f"{at}: a {kind!r} block is not supported here.", param=at)
    if parts:
        plain = all(part["type"] == "text" for part in parts)
        messages.append({"role": role, "content": "\n".join(p["text"] for p in parts) if plain else parts})
    return messages


def _image_url(source: Mapping[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url"))
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


def _assistant(blocks: Sequence[Json], at: str) -> list[Json]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            arguments = dumps(block.get("input") or {}).decode()
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
        else:
            raise bad_request(f"{at}: a {kind!r} block is not supported here.", param=at)
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tools(tools: Any) -> list[Json]:
    if not isinstance(tools, list):
        raise bad_request("tools must be a list.", param="tools")
    functions = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise bad_request(f"tools[{i}] must be a tool with a name.", param=f"tools[{i}]")
        if tool.get("type", "custom") != "custom":
            raise bad_request(f"tools[{i}]: server tools ({tool['type']!r}) do not exist here.", param=f"tools[{i}]")
        function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function})
    return functions


def _tool_choice(choice: Any) -> Json:
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else None
    chosen: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none"}
    if kind == "tool":
        chosen[kind] = {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in chosen:
        raise bad_request("tool_choice.type must be auto, any, tool or none.", param="tool_choice")
    result: Json = {"tool_choice": chosen[kind]}
    if choice.get("disable_parallel_tool_use"):
        result["parallel_tool_calls"] = False
    return result


def usage_of(usage: Mapping[str, Any]) -> Json:
    """Anthropic counts cached prompt tokens beside the others, not among them."""
    cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    told: Json = {
        "input_tokens": int(usage.get("prompt_tokens") or 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": int(usage.get("completion_tokens") or 0),
    }
    if "agentkv" in usage:
        told["agentkv"] = usage["agentkv"]
    return told


class AnthropicDialect:
    """See `Dialect`. Blocks of a stream follow the order in which the engine sends text, thoughts and calls."""

    def __init__(self) -> None:
        self._id = f"msg_{secrets.token_hex(12)}"
        self._index = -1
        self._open = ""
        self._call = -1
        self._finish = "stop"
        self._matched: Any = None

    def headers(self, turn: Turn) -> Mapping[str, str]:
        return {}

    async def whole(self, turn: Turn, reply: Json) -> Json:
        choice = reply["choices"][0]
        message = choice["message"]
        content: list[Json] = []
        if message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            content.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": _input(call["function"]["arguments"]),
                }
            )
        stop, sequence = _stop(choice.get("finish_reason"), choice.get("matched_stop"))
        return {**self._shell(turn), "content": content, "stop_reason": stop, "stop_sequence": sequence} | {
            "usage": usage_of(reply["usage"])
        }

    def _shell(self, turn: Turn) -> Json:
        return {"id": self._id, "type": "message", "role": "assistant", "model": turn.plan.request.model}

    def begin(self, turn: Turn) -> bytes:
        usage = {"input_tokens": turn.plan.prompt_tokens, "output_tokens": 0}
        message = {**self._shell(turn), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def content(self, frames: list[bytes]) -> bytes:
        out = []
        for frame in frames:
            payload = payload_of(frame)
            if not payload.startswith(b"{"):
                continue
            for choice in orjson.loads(payload).get("choices") or ():
                out += self._delta(choice.get("delta") or {})
                if choice.get("finish_reason"):
                    self._finish, self._matched = choice["finish_reason"], choice.get("matched_stop")
        return b"".join(out)

    def _delta(self, delta: Json) -> list[bytes]:
        out: list[bytes] = []
        if delta.get("reasoning_content"):
            out += self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out.append(self._add("thinking_delta", thinking=delta["reasoning_content"]))
        if delta.get("content"):
            out += self._enter("text", {"type": "text", "text": ""})
            out.append(self._add("text_delta", text=delta["content"]))
        for part in delta.get("tool_calls") or ():
            function = part.get("function") or {}
            if part.get("id") and part.get("index", 0) != self._call:
                self._call = part.get("index", 0)
                block = {"type": "tool_use", "id": part["id"], "name": function.get("name"), "input": {}}
                out += self._enter(f"call {self._call}", block)
            if function.get("arguments"):
                out.append(self._add("input_json_delta", partial_json=function["arguments"]))
        return out

    def _enter(self, kind: str, block: Json) -> list[bytes]:
        if self._open == kind:
            return []
        out = self._leave()
        self._index += 1
        self._open = kind
        return [*out, _event("content_block_start", index=self._index, content_block=block)]

    def _leave(self) -> list[bytes]:
        if not self._open:
            return []
        out = [_event("content_block_stop", index=self._index)]
        if self._open == "thinking":
            out.insert(0, self._add("signature_delta", signature=""))
        self._open = ""
        return out

    def _add(self, kind: str, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **delta})

    async def end(self, turn: Turn) -> bytes:
        stop, sequence = _stop(self._finish, self._matched)
        delta = {"stop_reason": stop, "stop_sequence": sequence}
        usage = usage_of(turn.usage.get("usage") or {})
        return b"".join([*self._leave(), _event("message_delta", delta=delta, usage=usage), _event("message_stop")])

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + dumps(error_body(error)) + b"\n\n"

    def keep_alive(self, turn: Turn) -> bytes:
        return _event("ping")


def _stop(finish: str | None, matched: Any) -> tuple[str, str | None]:
    if finish == "stop" and isinstance(matched, str):
        return "stop_sequence", matched
    return _STOPS.get(finish or "stop", "end_turn"), None


def _input(arguments: str) -> Any:
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + dumps({"type": kind, **fields}) + b"\n\n"
