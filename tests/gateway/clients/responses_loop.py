"""A tool loop with the Responses API. Arguments: base URL, streamed or whole, "ids" or "items"."""

import json
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def main(base_url: str, mode: str, history: str) -> None:
    client = OpenAI(base_url=base_url, api_key="any", max_retries=0)
    items: list = [{"role": "user", "content": f"Weather? ({mode} {history})"}]
    previous, states, kinds, final = None, [], [], ""
    for _ in range(5):
        request = {"model": "tiny", "instructions": "Use the tool.", "input": items, "tools": TOOLS}
        if history == "ids":
            request["previous_response_id"] = previous
        if mode == "streamed":
            with client.responses.stream(**{k: v for k, v in request.items() if v is not None}) as stream:
                for _event in stream:
                    pass
                reply = stream.get_final_response()
        else:
            reply = client.responses.create(**request)
        assert reply.status == "completed"
        states.append(reply.usage.model_extra["agentkv"]["state"])
        kinds.append([item.type for item in reply.output])
        calls = [item for item in reply.output if item.type == "function_call"]
        results = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": f"sunny in {json.loads(call.arguments)['city']}",
            }
            for call in calls
        ]
        if not calls:
            final = reply.output_text
            break
        previous = reply.id
        items = results if history == "ids" else [*items, *(o.model_dump() for o in reply.output), *results]
    same = client.responses.retrieve(reply.id).output_text == final
    client.responses.delete(reply.id)
    print(json.dumps({"states": [[s] for s in states], "final": final, "items": kinds, "same": same}))


main(*sys.argv[1:])
