"""Prints multi-turn items of BFCL as chat transcripts, one JSON object a line.

A script for a Python that has `bfcl_eval` (and nothing of ours): the ground-truth calls of an item are executed on the
package's simulated APIs, so that every tool result is exactly what an agent that makes these calls would have read.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any

TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
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


def main() -> None:
    import bfcl_eval  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser()
    parser.add_argument("categories", nargs="+")
    parser.add_argument("--all-tools", action="store_true")
    chosen = parser.parse_args()
    data = Path(bfcl_eval.__file__).parent / "data"
    for number, category in enumerate(chosen.categories):
        name = f"BFCL_v4_multi_turn_{category}.json"
        answers = {item["id"]: item["ground_truth"] for item in _lines(data / "possible_answer" / name)}
        for item in _lines(data / name):
            made = transcript(data, item, answers[item["id"]], category == "long_context", chosen.all_tools)
            # The categories are variants of the same tasks.
            task = f"bfcl_multi_turn_{item['id'].rsplit('_', 1)[1]}"
            print(json.dumps({"id": item["id"], "task": task, "repeat": number, **made}))


def transcript(
    data: Path, item: dict[str, Any], truth: list[list[str]], long_context: bool, all_tools: bool
) -> dict[str, Any]:
    """Questions, calls and executed results in the order in which an agent would have had them."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils  # type: ignore[import-not-found]

    classes = item["involved_classes"]
    schemas = [
        schema for name in classes for schema in _lines(data / "multi_turn_func_doc" / f"{DOCUMENTS[name]}.json")
    ]
    order = {schema["name"]: list(schema["parameters"]["properties"]) for schema in schemas}
    messages: list[dict[str, Any]] = []
    called = set()
    for turn, calls in enumerate(truth):
        messages += item["question"][turn] if turn < len(item["question"]) else []
        for number, call in enumerate(calls):
            results, _ = multi_turn_utils.execute_multi_turn_func_call(
                [call], item["initial_config"], classes, "transcript", item["id"], long_context=long_context
            )
            name, arguments = _parse(call, order)
            called.add(name)
            identity = f"call_{turn}_{number}"
            function = {"name": name, "arguments": json.dumps(arguments)}
            tool_call = {"id": identity, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [tool_call]})
            messages.append({"role": "tool", "tool_call_id": identity, "content": results[0]})
        messages.append({"role": "assistant", "content": f"Step {turn + 1} is done."})
    tools = [
        {"type": "function", "function": _schema(schema)} for schema in schemas if all_tools or schema["name"] in called
    ]
    return {"messages": messages, "tools": tools}


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
