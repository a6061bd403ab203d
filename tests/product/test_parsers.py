"""SGLang's parsers are chosen by the model's family, and SGLang has every one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentkv_serve.model import default_model
from agentkv_serve.parsers import PARSERS, chat_template, parser_flags
from agentkv_serve.phase_tagger import get_family


def test_the_default_model() -> None:
    assert parser_flags(default_model()) == {"--tool-call-parser": "hermes"}


@pytest.mark.parametrize("given", [("--tool-call-parser", "qwen25"), ("--tool-call-parser=qwen25",)])
def test_the_users_flags_win(given: tuple[str, ...]) -> None:
    pytest.importorskip("sglang")
    from agentkv_serve.engine.launch import server_command

    command = server_command([*given], default_model(), 7, "127.0.0.1", cpu=True)
    assert command[command.index("--served-model-name") + 1] == "SmolLM2-135M-Instruct"
    assert "hermes" not in command and command[-len(given) :] == [*given]


def test_every_family_and_parser_exists() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    for family, (tool, reasoning) in PARSERS.items():
        assert get_family(family).name == family
        assert tool in FunctionCallParser.ToolCallParserEnum
        assert not reasoning or reasoning in ReasoningParser.DetectorMap


def test_template_of_a_folder(tmp_path: Path) -> None:
    assert chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert chat_template(tmp_path) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert chat_template(tmp_path) == "new"
