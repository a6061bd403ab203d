"""compose.yaml as Compose reads it: merges resolved, variables filled in."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.operate.tools import ROOT

DOCKER = ROOT / "docker"
_VARIABLE = re.compile(r"(\$\$)|\$\{([A-Z_]+)(?::-([^}]*))?\}")


def compose(**variables: str) -> dict[str, Any]:
    """The project with `variables`; `$$` is Compose's escape of `$`."""

    def fill(match: re.Match[str]) -> str:
        return "$" if match[1] else variables.get(match[2], match[3] or "")

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return _VARIABLE.sub(fill, node) if isinstance(node, str) else node

    return dict(walk(yaml.safe_load((DOCKER / "compose.yaml").read_text())))


def variables() -> dict[str, str]:
    """All variables of compose.yaml with their defaults."""
    return {
        m[1]: m[2] or "" for m in re.finditer(r"\$\{([A-Z_]+)(?::-([^}]*))?\}", (DOCKER / "compose.yaml").read_text())
    }
