"""Messages compared by meaning: what a client may change when it sends a conversation back, and what not.

Frameworks drop reasoning, re-space tool arguments, turn null content into "" and strings into parts. None of
that makes another conversation. Text, roles, tool-call ids, names and argument values do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

import orjson

from agentkv_serve.gateway.encoding import NestedTooDeeply, canonical, digest

Message = Mapping[str, Any]


def text_of(content: Any) -> str | None:
    """The text of a message content: string, null or text parts; None when it has other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
            return None
        texts.append(str(part.get("text") or ""))
    return "".join(texts)


def reasoning_of(message: Message) -> str:
    """The reasoning that an assistant message carries, stripped; "" when the client sent none."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return ""


def tool_calls_of(message: Message) -> list[tuple[str, str, bytes]]:
    """(id, function name, canonical arguments) of each tool call."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(
            (str(call.get("id") or ""), str(function.get("name") or ""), _arguments(function.get("arguments")))
        )
    return calls


def message_digest(message: Message) -> bytes:
    """The digest of one message's meaning."""
    role = str(message.get("role"))
    content = message.get("content")
    text = text_of(content)
    body = canonical(content) if text is None else text.encode("utf-8", "surrogatepass")
    if role != "assistant":
        name = str(message.get("name") or "").encode()
        return digest(role.encode(), body, name, str(message.get("tool_call_id") or "").encode())
    # Parsers and clients disagree about blanks around the visible text of an assistant turn.
    calls = [part for i, n, a in tool_calls_of(message) for part in (i.encode(), n.encode(), a)]
    legacy = message.get("function_call")
    return digest(role.encode(), body.strip(), canonical(legacy) if legacy else b"", *calls)


def chain_and_head(
    messages: Sequence[Message], tools: Any, template_kwargs: Mapping[str, Any]
) -> tuple[list[bytes], tuple[bytes, bytes]]:
    """What a request's content says of its session.

    First the chained digests: entry i stands for the tools, the template arguments and messages[:i]. Then those of
    the leading system (or developer) messages and of the tools: what makes two requests the same agent even when the
    history between them was rewritten.
    """
    digests = [message_digest(message) for message in messages]
    written = canonical(tools or [])
    lead = len(list(takewhile(_leads, messages)))
    head = digest(b"system", *digests[:lead]), digest(b"tools", written)
    state = digest(b"agentkv-1", written, canonical(dict(template_kwargs)))
    return list(accumulate(digests, digest, initial=state)), head


def _leads(message: Message) -> bool:
    return message.get("role") in ("system", "developer")


def _arguments(value: Any) -> bytes:
    if not isinstance(value, str):
        return canonical(value if value is not None else {})
    try:
        return canonical(orjson.loads(value)) if value.strip() else canonical({})
    except (orjson.JSONDecodeError, NestedTooDeeply):
        return value.encode("utf-8", "surrogatepass")
