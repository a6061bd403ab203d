"""Prints the 800 multi-turn items of BFCL as chat transcripts, one JSON object a line.

Run by a Python that sees the `bfcl_eval` package: the ground truth calls are executed on its simulated APIs.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import bfcl_eval  # type: ignore[import-not-found]
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils  # type: ignore[import-not-found]

DATA = Path(bfcl_eval.__file__).parent / "data"
CATEGORIES = ("base", "long_context", "miss_func", "miss_param")
DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def main() -> None:
    for category in CATEGORIES:
        name = f"BFCL_v4_multi_turn_{category}.json"
        answers = {item["id"]: item["ground_truth"] for item in _lines(DATA / "possible_answer" / name)}
        for item in _lines(DATA / name):
            print(json.dumps(transcript(item, answers[item["id"]], category == "long_context")))


def transcript(item: dict[str, Any], truth: list[list[str]], long_context: bool) -> dict[str, Any]:
    """Questions, calls and executed results in the order in which an agent would have had them."""
    classes = item["involved_classes"]
    schemas = [
        schema for name in classes for schema in _lines(DATA / "multi_turn_func_doc" / f"{DOCUMENTS[name]}.json")
    ]
    order = {schema["name"]: list(schema["parameters"]["properties"]) for schema in schemas}
    messages: list[dict[str, Any]] = []
    for turn, calls in enumerate(truth):
        messages += item["question"][turn] if turn < len(item["question"]) else []
        for number, call in enumerate(calls):
            results, _ = multi_turn_utils.execute_multi_turn_func_call(
                [call], item["initial_config"], classes, "transcript", item["id"], long_context=long_context
            )
            name, arguments = _parse(call, order)
            identity = f"call_{turn}_{number}"
            function = {"name": name, "arguments": json.dumps(arguments)}
            called = {"id": identity, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
            messages.append({"role": "tool", "tool_call_id": identity, "content": results[0]})
        messages.append({"role": "assistant", "content": f"Step {turn + 1} is done."})
    tools = [{"type": "function", "function": _schema(schema)} for schema in schemas]
    return {"id": item["id"], "messages": messages, "tools": tools}


def _parse(call: str, order: dict[str, list[str]]) -> tuple[str, dict[str, Any]]:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    name = ast.unparse(node.func)
    arguments = {key: _value(value) for key, value in zip(order.get(name, []), node.args, strict=False)}
    return name, arguments | {word.arg or "": _value(word.value) for word in node.keywords}


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _schema(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: TYPES.get(item, item) if key == "type" and isinstance(item, str) else _schema(item)
            for key, item in value.items()
            if key != "response"
        }
    return [_schema(item) for item in value] if isinstance(value, list) else value


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
