"""Parallel tools and structured output with the openai SDK. Argument: base URL."""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    people: int


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="any", max_retries=0)
    parsed = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "structured"}], response_format=City
    )
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("weather", "time")]
    messages: list = [{"role": "user", "content": "parallel"}]
    with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
        for _event in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    messages.append(message)
    for call in reversed(message.tool_calls):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name} is fine"})
    reply = client.chat.completions.create(model="tiny", messages=messages, tools=tools)
    print(
        json.dumps(
            {
                "city": parsed.choices[0].message.parsed.model_dump(),
                "calls": [[c.function.name, json.loads(c.function.arguments)] for c in message.tool_calls],
                "state": reply.usage.model_extra["agentkv"]["state"],
            }
        )
    )


main(*sys.argv[1:])
