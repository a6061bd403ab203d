"""A tool loop with Anthropic's SDK. Arguments: base URL, streamed or whole, session id or ""."""

import json
import sys

import anthropic

TOOLS = [
    {
        "name": "weather",
        "description": "Weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def main(base_url: str, mode: str, session: str) -> None:
    headers = {"X-AgentKV-Session": session} if session else {}
    client = anthropic.Anthropic(
        base_url=base_url.removesuffix("/v1"), api_key="any", default_headers=headers, max_retries=0
    )
    messages: list = [{"role": "user", "content": f"Weather? ({mode} {session})"}]
    states, final, kinds = [], "", []
    counted = client.messages.count_tokens(model="tiny", system="Use the tool.", messages=messages, tools=TOOLS)
    for _ in range(5):
        request = {"model": "tiny", "max_tokens": 100, "system": "Use the tool.", "messages": messages, "tools": TOOLS}
        if mode == "streamed":
            with client.messages.stream(**request) as stream:
                for event in stream:
                    if event.type == "message_delta":
                        told = event.usage.model_extra["agentkv"]
                reply = stream.get_final_message()
        else:
            reply = client.messages.create(**request)
            told = reply.usage.model_extra["agentkv"]
        states.append([told["state"], reply.usage.cache_read_input_tokens])
        kinds.append([block.type for block in reply.content])
        messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
        if reply.stop_reason != "tool_use":
            final = reply.content[-1].text
            break
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": f"sunny in {b.input['city']}"}
            for b in reply.content
            if b.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    print(json.dumps({"states": states, "final": final, "kinds": kinds, "counted": counted.input_tokens}))


main(*sys.argv[1:])
