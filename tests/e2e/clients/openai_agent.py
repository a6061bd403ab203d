"""A five-turn tool loop with the openai SDK against a real model: four calls, then an answer in words.

Arguments: base URL, whole or streamed, session id or "", what the rooms' temperatures start at.
Prints one JSON object.
"""

import json
import sys

from openai import OpenAI

ROOMS = ["kitchen", "bedroom", "hall"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "Read the temperature of a room.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"room": {"type": "string", "enum": ROOMS}},
                "required": ["room"],
                "additionalProperties": False,
            },
        },
    }
]


def streamed(client: OpenAI, request: dict):
    """The message and usage of a streamed reply, put together by hand.

    The SDK's own helper raises when a reply ends at the token limit while a strict tool is offered.
    """
    message: dict = {"role": "assistant", "content": ""}
    calls: dict[int, dict] = {}
    *chunks, end = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        for part in delta.tool_calls or []:
            call = calls.setdefault(part.index, {"type": "function", "function": {"name": "", "arguments": ""}})
            call["id"] = part.id or call["id"]
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message, end.usage


def main(base_url: str, mode: str, session: str, coldest: str) -> None:
    headers = {"X-AgentKV-Session": session} if session else {}
    client = OpenAI(base_url=base_url, api_key="any", default_headers=headers, max_retries=0, timeout=120)
    model = client.models.list().data[0].id
    messages: list = [
        {"role": "system", "content": "Answer with the tool."},
        {"role": "user", "content": "How warm is it in my home?"},
    ]
    request = {"model": model, "messages": messages, "tools": TOOLS, "temperature": 0, "parallel_tool_calls": False}
    told, calls = [], []

    def note(usage) -> None:
        told.append({"state": usage.model_extra["agentkv"]["state"], "prompt_tokens": usage.prompt_tokens})
        told[-1]["cached_tokens"] = usage.prompt_tokens_details.cached_tokens

    for _ in range(4):
        # The grammar holds the model to a call and then lets it talk on: 40 tokens hold the call.
        options = {"tool_choice": "required", "max_tokens": 40}
        if mode == "streamed":
            message, usage = streamed(client, {**request, **options})
        else:
            reply = client.chat.completions.create(**request, **options)
            message, usage = reply.choices[0].message.model_dump(exclude_none=True), reply.usage
        note(usage)
        messages.append(message)
        for call in message["tool_calls"]:
            calls.append([call["function"]["name"], json.loads(call["function"]["arguments"])])
            degrees = int(coldest) + ROOMS.index(calls[-1][1]["room"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{degrees} degrees"})
    last = {**request, "tool_choice": "none", "max_tokens": 24}
    if mode == "streamed":
        message, usage = streamed(client, last)
        answer = message["content"]
    else:
        reply = client.chat.completions.create(**last)
        usage, answer = reply.usage, reply.choices[0].message.content
    note(usage)
    print(json.dumps({"turns": told, "calls": calls, "answer": answer}))


main(*sys.argv[1:])
