"""OpenAI's Responses API over chat turns, with `previous_response_id`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from agentkv_serve.gateway.dialects.dialect import Json
from agentkv_serve.gateway.encoding import dumps
from agentkv_serve.gateway.errors import ApiError, bad_request
from agentkv_serve.gateway.turns.turn import Turn
from agentkv_serve.gateway.upstream.frames import payload_of

_PASSED = ("temperature", "top_p", "parallel_tool_calls", "agentkv", "metadata", "session_id", "prompt_cache_key")
_UNSUPPORTED = ("background", "conversation", "prompt")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")

Keep = Callable[[str, Json], Awaitable[None]]


def chat_body(body: Json, history: list[Json]) -> Json:
    """A Responses request as a chat request that goes on from `history`. Raises 400 that names the field."""
    for name in _UNSUPPORTED:
        if body.get(name):
            raise bad_request(f"{name} is not supported here; send the conversation itself.", param=name)
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    chat: Json = {name: body[name] for name in _PASSED if body.get(name) is not None}
    chat |= {"model": body.get("model"), "messages": [*messages, *history, *input_messages(body.get("input"))]}
    chat |= {"max_tokens": body.get("max_output_tokens"), "stream": body.get("stream")}
    if body.get("tools"):
        chat["tools"] = _tools(body["tools"])
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise bad_request("tool_choice must be auto, none, required or a function.", param="tool_choice")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None:
        chat["tool_choice"] = choice
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort"):
        chat["reasoning_effort"] = reasoning["effort"]
    text = body.get("text")
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        chat |= _format(text["format"])
    return chat


def input_messages(given: Any) -> list[Json]:
    """Chat messages of `input`: a text, or items. Reasoning, text and calls that belong to one assistant turn
    become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad_request("input must be a text or a list of items.", param="input")
    messages: list[Json] = []
    for i, item in enumerate(given):
        if not isinstance(item, dict):
            raise bad_request(f"input[{i}] must be an object.", param=f"input[{i}]")
        _item(messages, item, f"input[{i}]")
    return messages


def _item(messages: list[Json], item: Json, at: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        text = _content(item.get("content"), at)
        if item.get("role") == "assistant":
            message = _assistant(messages, "content")
            message["content"] = text
        else:
            messages.append({"role": item.get("role"), "content": text})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        thought = _content(parts, at)
        if thought:
            _assistant(messages, "reasoning_content")["reasoning_content"] = thought
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages, "").setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = _content(item.get("output"), at)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    else:
        raise bad_request(f"{at}: items of type {kind!r} are not supported here.", param=at)


def _assistant(messages: list[Json], field: str) -> Json:
    """The assistant message that is being put together; a new one when `field` is taken or calls came already."""
    last = messages[-1] if messages else {}
    fits = last.get("role") == "assistant" and not (field and (last.get(field) or last.get("tool_calls")))
    if not fits:
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(content: Any, at: str) -> Any:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise bad_request(f"{at}: content must be a text or a list of parts.", param=at)
    parts: list[Json] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS:
            text = part.get("text") or part.get("refusal") or ""
            if not isinstance(text, str):
                raise bad_request(f"{at}: the text of a part must be a string.", param=at)
            parts.append({"type": "text", "text": text})
        elif kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            raise bad_request(f"{at}: parts of type {kind!r} are not supported here.", param=at)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _tools(tools: Any) -> list[Json]:
    if not isinstance(tools, list):
        raise bad_request("tools must be a list.", param="tools")
    functions = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise bad_request(f"tools[{i}] must be a function: hosted tools do not exist here.", param=f"tools[{i}]")
        function = {k: tool[k] for k in ("name", "description", "parameters", "strict") if tool.get(k) is not None}
        functions.append({"type": "function", "function": function})
    return functions


def _format(form: Json) -> Json:
    if form.get("type") == "json_schema":
        schema = {k: form[k] for k in ("name", "schema", "strict", "description") if form.get(k) is not None}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"response_format": {"type": "json_object"}} if form.get("type") == "json_object" else {}


class ResponsesDialect:
    """See `Dialect`. `keep` stores a finished response under its id, for `previous_response_id`."""

    def __init__(self, body: Json, keep: Keep) -> None:
        self._body = body
        self._keep = keep
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._sequence = -1
        self._items: list[Json] = []
        self._call = -1
        self._finish = "stop"

    def headers(self, turn: Turn) -> Mapping[str, str]:
        return {}

    async def whole(self, turn: Turn, reply: Json) -> Json:
        choice = reply["choices"][0]
        message = choice["message"]
        if message.get("reasoning_content"):
            self._items.append(_reasoning(message["reasoning_content"]))
        if message.get("content"):
            self._items.append(_message(message["content"]))
        for call in message.get("tool_calls") or ():
            self._items.append(_function_call(call["id"], call["function"]["name"], call["function"]["arguments"]))
        self._finish = choice.get("finish_reason") or "stop"
        return await self._finished(turn, reply.get("usage") or {})

    async def _finished(self, turn: Turn, usage: Json) -> Json:
        for item in self._items:
            if "status" in item:
                item["status"] = "completed"
        response = self._object(turn, "incomplete" if self._finish == "length" else "completed", usage)
        if self._body.get("store") is not False:
            messages = [m for m in turn.plan.request.messages if m is not self._instructions(turn)]
            history = [*messages, *(input_messages(self._items) if self._items else [])]
            kept = {"response": response, "messages": history, "session": turn.plan.session_id}
            await self._keep(self._id, kept)
        return response

    def _instructions(self, turn: Turn) -> Json | None:
        # Instructions hold for one response only; the next one brings its own.
        return turn.plan.request.messages[0] if self._body.get("instructions") else None

    def _object(self, turn: Turn, status: str, usage: Json | None = None) -> Json:
        body = self._body
        response: Json = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "model": turn.plan.request.model,
            "output": self._items,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": body.get("store", True),
            "temperature": body.get("temperature"),
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "truncation": "disabled",
            "usage": None,
            "metadata": body.get("metadata") or {},
        }
        if usage is not None:
            response["usage"] = _usage(usage)
        return response

    def begin(self, turn: Turn) -> bytes:
        response = self._object(turn, "in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def content(self, frames: list[bytes]) -> bytes:
        out: list[bytes] = []
        for frame in frames:
            payload = payload_of(frame)
            if not payload.startswith(b"{"):
                continue
            for choice in orjson.loads(payload).get("choices") or ():
                self._delta(choice.get("delta") or {}, out)
                self._finish = choice.get("finish_reason") or self._finish
        return b"".join(out)

    def _delta(self, delta: Json, out: list[bytes]) -> None:
        if delta.get("reasoning_content"):
            part = self._enter("reasoning", lambda: _reasoning(""), out)["content"][0]
            part["text"] += delta["reasoning_content"]
            out.append(self._part_event("response.reasoning_text.delta", delta=delta["reasoning_content"]))
        if delta.get("content"):
            part = self._enter("message", lambda: _message(""), out)["content"][0]
            part["text"] += delta["content"]
            out.append(self._part_event("response.output_text.delta", delta=delta["content"], logprobs=[]))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if call.get("id") and call.get("index", 0) != self._call:
                self._call = call.get("index", 0)
                self._leave(out)
                self._add(_function_call(call["id"], function.get("name") or "", ""), out)
            if function.get("arguments"):
                self._items[-1]["arguments"] += function["arguments"]
                out.append(self._item_event("response.function_call_arguments.delta", delta=function["arguments"]))

    def _enter(self, kind: str, make: Callable[[], Json], out: list[bytes]) -> Json:
        if not self._items or self._items[-1]["type"] != kind:
            self._leave(out)
            item = make()
            self._add(item, out)
            out.append(self._part_event("response.content_part.added", part=dict(item["content"][0])))
        return self._items[-1]

    def _add(self, item: Json, out: list[bytes]) -> None:
        self._items.append(item)
        shown = {**item, "content": []} if "content" in item else item
        out.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown))

    def _leave(self, out: list[bytes]) -> None:
        if not self._items:
            return
        item = self._items[-1]
        if item.get("status") == "in_progress":
            item["status"] = "completed"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            out.append(self._item_event("response.function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            kind = "response.output_text.done" if item["type"] == "message" else "response.reasoning_text.done"
            extra: Json = {"logprobs": []} if item["type"] == "message" else {}
            out.append(self._part_event(kind, text=part["text"], **extra))
            out.append(self._part_event("response.content_part.done", part=part))
        out.append(self._event("response.output_item.done", output_index=len(self._items) - 1, item=item))

    async def end(self, turn: Turn) -> bytes:
        out: list[bytes] = []
        self._leave(out)
        response = await self._finished(turn, turn.usage.get("usage") or {})
        out.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(out)

    def failure(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def keep_alive(self, turn: Turn) -> bytes:
        return b": ping\n\n"

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        body = dumps({"type": kind, "sequence_number": self._sequence, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _message(text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
    return {**head, "status": "in_progress", "content": [part]}


def _reasoning(text: str) -> Json:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "content": content}


def _function_call(call_id: str, name: str, arguments: str) -> Json:
    head = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
    return {**head, "call_id": call_id, "name": name, "arguments": arguments}


def _usage(usage: Mapping[str, Any]) -> Json:
    told: Json = {
        "input_tokens": int(usage.get("prompt_tokens") or 0),
        "input_tokens_details": {
            "cached_tokens": int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        },
        "output_tokens": int(usage.get("completion_tokens") or 0),
        "output_tokens_details": {"reasoning_tokens": int(usage.get("reasoning_tokens") or 0)},
        "total_tokens": int(usage.get("total_tokens") or 0),
    }
    if "agentkv" in usage:
        told["agentkv"] = usage["agentkv"]
    return told
