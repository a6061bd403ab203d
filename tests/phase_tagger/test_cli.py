"""`agentkv label`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkv_serve.phase_tagger.cli import app
from agentkv_serve.phase_tagger.formats.files import TranscriptError, read_transcripts

from .tiny import tiny_tokenizer
from .transcripts import HERE, names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with nothing but a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return path


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_json(folder: Path) -> None:
    code, output = run(HERE / "12_claude_code_session_blocks.json", "--tokenizer", folder, "--json")
    found = json.loads(output)
    assert code == 0 and found["confidence"] == "high" and found["runs"][-1][1] == found["tokens"]
    assert sum(found["labels"].values()) == sum(found["phases"].values()) == found["tokens"]
    assert found["labels"]["think"] and found["labels"]["act"] and found["labels"]["tool"]


def test_say_counts_as_the_chosen_phase(folder: Path) -> None:
    file = HERE / "01_tau_airline_tool_errors.json"
    others, act = (json.loads(run(file, "--tokenizer", folder, "--json", "--say", say)[1]) for say in ("others", "act"))
    assert act["phases"]["act"] == others["phases"]["act"] + others["labels"]["say"]


def test_terminal_and_html(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, output = run(HERE / "05_bfcl_base_0_filesystem.json", "--tokenizer", folder, "--html", page)
    assert code == 0 and "final_report.pdf" in output and "confidence high" in output
    html = page.read_text("utf-8")
    assert '<span class="tool" title="tool">' in html and "&lt;tool_call&gt;" in html and "<script" not in html


def test_markup_in_a_transcript_is_escaped(folder: Path, tmp_path: Path) -> None:
    file, page = tmp_path / "x.json", tmp_path / "x.html"
    file.write_text(json.dumps([{"role": "user", "content": "<script>alert(1)</script> [bold]x[/bold]"}]))
    code, output = run(file, "--tokenizer", folder, "--html", page)
    assert code == 0 and "[bold]x[/bold]" in output
    assert "<script" not in page.read_text("utf-8")


@pytest.mark.parametrize("name", [name for name in names() if (HERE / name).is_file() and "simple_tool" not in name])
def test_every_recorded_file_is_read(folder: Path, name: str) -> None:
    code, output = run(HERE / name, "--tokenizer", folder, "--no-text", "--item", "0")
    assert code == 0, output


@pytest.mark.parametrize("text", ["", "just text", "{}", "[]", "[1, 2]", '{"a": 1}\n{"b": 2}'])
def test_files_without_a_transcript(folder: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(TranscriptError):
        read_transcripts(file)
    assert run(file, "--tokenizer", folder)[0] == 1


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    code, output = run(HERE / "05_bfcl_base_0_filesystem.json", "--tokenizer", tmp_path)
    assert code == 1 and "no tokenizer.json" in output


def test_bodies_of_the_other_apis(folder: Path, tmp_path: Path) -> None:
    bodies = {
        "responses": {"input": [{"type": "function_call_output", "call_id": "c", "output": "r"}], "instructions": "s"},
        "anthropic": {"system": "s", "messages": [{"role": "user", "content": "Hi"}]},
        "lines": None,
    }
    for name, body in bodies.items():
        file = tmp_path / f"{name}.json"
        lines = [{"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "b"}]}]
        file.write_text(json.dumps(body) if body else "\n".join(map(json.dumps, lines)))
    assert [m["role"] for m in read_transcripts(tmp_path / "responses.json")[0].messages] == ["system", "tool"]
    assert [m["role"] for m in read_transcripts(tmp_path / "anthropic.json")[0].messages] == ["system", "user"]
    assert [t.messages[0]["content"] for t in read_transcripts(tmp_path / "lines.json")] == ["a", "b"]
