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
            "parameters": {
                "type": "object",
                "properties": {"room": {"type": "string", "enum": ROOMS}},
                "required": ["room"],
            },
        },
    }
]


def main(base_url: str, mode: str, session: str, coldest: str) -> None:
    headers = {"X-AgentKV-Session": session} if session else {}
    client = OpenAI(base_url=base_url, api_key="any", default_headers=headers, max_retries=0, timeout=120)
    model = client.models.list().data[0].id
    messages: list = [
        {"role": "system", "content": "Answer with the tool."},
        {"role": "user", "content": "How warm is it in my home?"},
    ]
    told, calls = [], []
    for choice in ["required"] * 4 + ["none"]:
        request = {"model": model, "messages": messages, "tools": TOOLS, "tool_choice": choice}
        request |= {"temperature": 0, "max_tokens": 96 if choice == "required" else 24}
        if mode == "streamed":
            with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
                for _event in stream:
                    pass
                reply = stream.current_completion_snapshot
        else:
            reply = client.chat.completions.create(**request)
        usage = reply.usage
        told.append({"cached_tokens": usage.prompt_tokens_details.cached_tokens})
        told[-1] |= {"prompt_tokens": usage.prompt_tokens, "state": usage.model_extra["agentkv"]["state"]}
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            calls.append([call.function.name, json.loads(call.function.arguments)])
            degrees = int(coldest) + ROOMS.index(calls[-1][1]["room"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{degrees} degrees"})
    print(json.dumps({"turns": told, "calls": calls, "answer": message.content}))


main(*sys.argv[1:])
