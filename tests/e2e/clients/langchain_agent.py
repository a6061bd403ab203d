"""A five-turn tool loop with langchain-openai against a real model: four calls, then an answer in words.

Arguments: base URL, whole or streamed, session id or "", what the rooms' temperatures start at.
Prints one JSON object.
"""

import json
import sys
from typing import Literal, get_args
from urllib.request import urlopen

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

Room = Literal["kitchen", "bedroom", "hall"]


def main(base_url: str, mode: str, session: str, coldest: str) -> None:
    @tool
    def temperature(room: Room) -> str:
        """Read the temperature of a room."""
        return f"{int(coldest) + get_args(Room).index(room)} degrees"

    plain = ChatOpenAI(
        model=json.load(urlopen(f"{base_url}/models"))["data"][0]["id"],
        base_url=base_url,
        api_key="any",
        default_headers={"X-AgentKV-Session": session} if session else {},
        max_retries=0,
        temperature=0,
        # The grammar holds the model to a call and then lets it talk on: 40 tokens hold the call.
        max_tokens=40,
        stream_usage=True,
        include_response_headers=True,
    )
    messages: list = [SystemMessage("Answer with the tool."), HumanMessage("How warm is it in my home?")]
    told, calls = [], []
    for choice in ["required"] * 4 + ["none"]:
        model = plain.bind_tools([temperature], tool_choice=choice, strict=True, parallel_tool_calls=False)
        if mode == "streamed":
            reply = None
            for chunk in model.stream(messages):
                reply = chunk if reply is None else reply + chunk
        else:
            reply = model.invoke(messages)
        usage = reply.usage_metadata
        told.append({"cached_tokens": usage["input_token_details"]["cache_read"]})
        told[-1] |= {"prompt_tokens": usage["input_tokens"]}
        told[-1] |= {"state": reply.response_metadata["headers"]["x-agentkv-session-state"]}
        messages.append(reply)
        for call in reply.tool_calls:
            calls.append([call["name"], call["args"]])
            messages.append(ToolMessage(temperature.invoke(call["args"]), tool_call_id=call["id"]))
    print(json.dumps({"turns": told, "calls": calls, "answer": reply.text}))


main(*sys.argv[1:])
