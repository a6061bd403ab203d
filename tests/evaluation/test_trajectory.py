from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agentkv_serve.evaluation.trajectory import Recording, half_of, read_recordings, tokenise
from agentkv_serve.phase_tagger import ChatFormat, Label
from agentkv_serve.phase_tagger.formats.files import Transcript

from . import runs


def test_spans_are_by_author(folder: Path) -> None:
    trajectory = runs.trajectory(folder)
    assert [span.generated for span in trajectory.spans] == [False, True] * 6 + [False]
    assert [span.end for span in trajectory.spans[:-1]] == [span.start for span in trajectory.spans[1:]]
    assert (trajectory.spans[0].start, trajectory.spans[-1].end) == (0, len(trajectory.ids))
    end = ChatFormat.from_folder(folder).vocabulary.id_of("<|im_end|>")
    for span in trajectory.spans:
        own = trajectory.labels[span.start : span.end]
        if span.generated:
            assert trajectory.ids[span.end - 1] == end
            assert np.isin(own[:-1], (Label.ACT, Label.SAY)).all()
        else:
            assert not np.isin(own, (Label.THINK, Label.ACT, Label.SAY)).any()


def test_evidence_is_what_users_and_tools_said(folder: Path) -> None:
    trajectory = runs.trajectory(folder, turns=1)
    text = ChatFormat.from_folder(folder).vocabulary.decode(trajectory.ids[trajectory.evidence].tolist())
    assert "What about my order #W7340112?" in text
    assert '"status": "shipped"' in text
    assert "You help with orders" not in text
    assert "has been shipped" not in text


def test_cut(folder: Path) -> None:
    whole, cut = runs.trajectory(folder), runs.trajectory(folder, length=200)
    assert len(cut.ids) == 200
    assert (cut.ids == whole.ids[:200]).all()
    assert cut.spans[-1].end == 200


def test_too_little_text_is_left_out(folder: Path) -> None:
    short = Transcript("s", [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}])
    assert tokenise(ChatFormat.from_folder(folder), Recording("s", "s", 0, "report", "s", short)) is None


def test_thoughts_before_actions(folder: Path) -> None:
    """An agent that acts in every message, and one that acts in plain text: what it says first is its reasoning."""
    chat = ChatFormat.from_folder(folder)
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    calls = [{"role": "user", "content": "Fix it."}]
    text = [{"role": "user", "content": "Fix it."}]
    for _ in range(3):
        calls.append({"role": "assistant", "content": "Let me look around first.", "tool_calls": [call]})
        calls.append({"role": "tool", "tool_call_id": "c", "content": "a.py"})
        text.append({"role": "assistant", "content": "Let me look around first.\n<command>\nls\n</command>"})
        text.append({"role": "user", "content": "a.py"})
    for messages in (calls, text):
        found = tokenise(chat, Recording("r", "r", 0, "report", "r", Transcript("r", messages)))
        assert found is not None
        thought = chat.vocabulary.decode(found.ids[found.labels == Label.THINK].tolist())
        assert thought.count("Let me look around first.") == 3
        assert "a.py" in chat.vocabulary.decode(found.ids[found.labels == Label.TOOL].tolist())
    chatty = [*runs.messages(2)]
    chatty[2]["content"] = "One moment please."
    found = tokenise(chat, Recording("r", "r", 0, "report", "r", Transcript("r", chatty)))
    assert found is not None
    assert not (found.labels == Label.THINK).any()


@pytest.mark.parametrize(("number", "half"), [(0, "development"), (4, "development"), (2, "report"), (46, "report")])
def test_split_of_numbered_tasks(number: int, half: str) -> None:
    assert half_of(f"airline/task{number}", number) == half


def test_split_of_names_is_their_digest_parity() -> None:
    # echo -n NAME | sha256sum: the parity of the last hexadecimal digit.
    assert half_of("07_sweagent_function_calling") == "development"
    assert half_of("08_sweagent_xml_command_in_text") == "report"


def test_files_take_turns_and_tasks_come_before_repeats(tmp_path: Path) -> None:
    tau = [{"task_id": task, "trial": trial, "traj": runs.messages(1)} for task in (0, 2, 4, 6) for trial in (0, 1)]
    (tmp_path / "tau.json").write_text(json.dumps(tau))
    lines = [
        {"id": f"multi_turn_{kind}_{n}", "task": f"bfcl_multi_turn_{n}", "repeat": k, "messages": runs.messages(1)}
        for k, kind in enumerate(("base", "long"))
        for n in range(4)
    ]
    (tmp_path / "bfcl.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = [tmp_path / "tau.json", tmp_path / "bfcl.jsonl"]
    every = read_recordings(files)
    assert len(every) == 16
    assert [recording.source for recording in every[:4]] == ["tau", "bfcl", "tau", "bfcl"]
    assert len({recording.task for recording in every[:8]}) == 8
    halves = {half: read_recordings(files, half) for half in ("development", "report")}
    assert {r.name for half in halves.values() for r in half} == {r.name for r in every}
    tasks = [{r.task for r in half} for half in halves.values()]
    assert not tasks[0] & tasks[1]
    assert {r.task for r in halves["report"] if r.source == "tau"} == {"tau/task2", "tau/task6"}
