"""A tool loop with the openai SDK. Arguments: base URL, streamed or whole, session id or ""."""

import json
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def main(base_url: str, mode: str, session: str) -> None:
    headers = {"X-AgentKV-Session": session} if session else {}
    client = OpenAI(base_url=base_url, api_key="any", default_headers=headers, max_retries=0)
    messages: list = [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": f"Weather? ({mode} {session})"},
    ]
    states, final = [], ""
    for _ in range(5):
        if mode == "streamed":
            with client.chat.completions.stream(
                model="tiny", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
            ) as stream:
                for _event in stream:
                    pass
                reply = stream.get_final_completion()
        else:
            reply = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        told = reply.usage.model_extra["agentkv"]
        states.append([told["state"], told["prefill_tokens"], reply.usage.prompt_tokens_details.cached_tokens])
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            final = message.content
            break
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"})
    print(json.dumps({"states": states, "final": final}))


main(*sys.argv[1:])
