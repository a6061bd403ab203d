"""Which of SGLang's own parsers make tool calls and reasoning out of a model's text."""

from __future__ import annotations

import json
from pathlib import Path

from agentkv_serve.phase_tagger import Vocabulary, detect_family

# Family -> SGLang's names of (tool-call parser, reasoning parser); "" where SGLang has none for it.
PARSERS: dict[str, tuple[str, str]] = {
    "chatml": ("hermes", ""),
    "hermes": ("hermes", ""),
    "smollm2": ("hermes", ""),
    "smollm3": ("hermes", "qwen3"),
    "qwen2.5": ("qwen25", ""),
    "qwen3": ("qwen25", "qwen3"),
    "qwen3-coder": ("qwen3_coder", ""),
    "qwen3.5": ("qwen3_coder", "qwen3"),
    "llama3": ("llama3", ""),
    "mistral": ("mistral", ""),
    "ministral": ("mistral", ""),
    "magistral": ("mistral", "mistral"),
    "deepseek-r1": ("deepseekv3", "deepseek-r1"),
}


def parser_flags(model: Path) -> dict[str, str]:
    """Returns SGLang's `--tool-call-parser` and `--reasoning-parser` for a model folder, where it has any."""
    tool, reasoning = PARSERS.get(detect_family(Vocabulary(model), chat_template(model)).name, ("", ""))
    flags = {"--tool-call-parser": tool, "--reasoning-parser": reasoning}
    return {flag: name for flag, name in flags.items() if name}


def chat_template(model: Path) -> str | None:
    """Returns a model folder's chat template, or None."""
    if (alone := model / "chat_template.jinja").is_file():
        return alone.read_text(encoding="utf-8")
    try:
        inside = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError):
        return None
    return inside if isinstance(inside, str) else None
