"""The tools of the demo's airline agent. Their data is what the recorded run saw.

Standard library only: the LangChain demo imports it in the clients' environment.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

from agentkv_serve.demo.recording import Recording

Tool = Callable[..., str]


class Airline:
    """An airline's booking desk that knows the reservations and flights of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._known = {(c.name, _canonical(json.loads(c.arguments))): c.result for c in recording.calls}

    def tools(self) -> list[Tool]:
        """Returns the functions that an agent may call."""
        return [
            self.get_reservation_details,
            self.search_direct_flight,
            self.update_reservation_flights,
            self.think,
        ]

    def get_reservation_details(self, reservation_id: str) -> str:
        """Get the details of a reservation."""
        return self._answer("get_reservation_details", reservation_id=reservation_id)

    def search_direct_flight(self, origin: str, destination: str, date: str) -> str:
        """Search direct flights between two airports on a date such as 2024-05-21."""
        return self._answer("search_direct_flight", origin=origin, destination=destination, date=date)

    def update_reservation_flights(
        self, reservation_id: str, cabin: str, flights: list[dict[str, str]], payment_id: str
    ) -> str:
        """Change the flights or the cabin of a reservation."""
        return self._answer(
            "update_reservation_flights",
            reservation_id=reservation_id,
            cabin=cabin,
            flights=flights,
            payment_id=payment_id,
        )

    def think(self, thought: str) -> str:
        """Write down a thought. It changes nothing."""
        return ""

    def _answer(self, tool: str, **arguments: Any) -> str:
        return self._known.get((tool, _canonical(arguments)), "Error: not found")


def run_tool(tools: list[Tool], name: str, arguments: str) -> str:
    """Runs the named tool with JSON arguments. What a model gets wrong comes back to it as text."""
    try:
        (tool,) = (t for t in tools if t.__name__ == name)
        return tool(**json.loads(arguments))
    except (ValueError, TypeError) as error:
        return f"Error: {error}"


def schema(tool: Tool) -> dict[str, Any]:
    """Returns the OpenAI tool schema of a typed function; its docstring is the description."""
    hints = get_type_hints(tool)
    hints.pop("return", None)
    properties = {name: _json_type(hint) for name, hint in hints.items()}
    return {
        "type": "function",
        "function": {
            "name": tool.__name__,
            "description": inspect.getdoc(tool),
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }


def _json_type(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is list:
        return {"type": "array", "items": _json_type(get_args(hint)[0])}
    return {"type": "string" if hint is str else "object"}


def _canonical(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True)
