"""The list of known faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_known_fault_has_its_test() -> None:
    rows = [line for line in (HERE / "FAULTS.md").read_text().splitlines() if re.match(r"\| (?!---|fault)", line)]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            tree = ast.parse((HERE / file).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
