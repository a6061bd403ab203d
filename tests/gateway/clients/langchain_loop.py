"""A tool loop with langchain-openai. Arguments: base URL, streamed or whole, session id or ""."""

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def main(base_url: str, mode: str, session: str) -> None:
    headers = {"X-AgentKV-Session": session} if session else {}
    model = ChatOpenAI(
        model="tiny", base_url=base_url, api_key="any", default_headers=headers, max_retries=0, stream_usage=True
    ).bind_tools([weather])
    messages: list = [SystemMessage("Use the tool."), HumanMessage(f"Weather? (langchain {mode} {session})")]
    cached, final = [], ""
    for _ in range(5):
        if mode == "streamed":
            reply = None
            for chunk in model.stream(messages):
                reply = chunk if reply is None else reply + chunk
        else:
            reply = model.invoke(messages)
        assert reply is not None
        cached.append(reply.usage_metadata["input_token_details"]["cache_read"])
        messages.append(reply)
        if not reply.tool_calls:
            final = reply.content
            break
        for call in reply.tool_calls:
            messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    print(json.dumps({"cached": cached, "final": final}))


main(*sys.argv[1:])
