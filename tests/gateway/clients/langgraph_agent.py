"""A tool agent of langgraph, asked twice. Argument: base URL."""

import asyncio
import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


async def main(base_url: str) -> None:
    model = ChatOpenAI(model="tiny", base_url=base_url, api_key="any", max_retries=0, stream_chunk_timeout=2)
    model = model.bind_tools([weather])

    async def think(state: MessagesState) -> dict:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "think")
    agent = graph.compile()
    messages: list = [("user", "Weather?")]
    finals = []
    for _ in range(2):
        state = await agent.ainvoke({"messages": messages})
        finals.append(state["messages"][-1].content)
        messages = [*state["messages"], ("user", "Again?")]
    # Streams that stay silent for longer than the client's patience between chunks.
    text = ""
    async for chunk in model.astream([("user", "slow")]):
        text += chunk.content
    print(json.dumps({"finals": finals, "slow": text}))


asyncio.run(main(*sys.argv[1:]))
