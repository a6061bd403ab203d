"""The engine's answer about one session: who holds which token, and the history of turns and compactions."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from starlette.requests import Request

from agentkv_serve.engine import kv_map
from agentkv_serve.engine.sessions import Compaction, FinishedTurn, KvState, SessionRecord, SessionTable
from agentkv_serve.engine.wire import Facts

LAYERS, HEADS = 2, 2
FACTS = Facts("new", None, 11, 5, 5, 10, {"think": 0.0, "act": 0.0, "tool": 1.5, "others": 3.5})


def kept() -> torch.Tensor:
    """[2, 2, 3] positions of a session that kept 3 of its first 8 tokens; 2 more came after."""
    return torch.tensor([[[0, 6, 7], [0, 6, 7]], [[2, 6, 7], [0, 6, 7]]], dtype=torch.int32)


def runtime(*, length: int = 10, state: KvState | None = None, running: str | None = None) -> Any:
    sessions = SessionTable(100.0, lambda: 0.0)
    record = SessionRecord("s", 3, 0.0, kv=state, running=running)
    record.turns.append(FinishedTurn(2, 5, "agentkv", 1, FACTS))
    record.compactions.append(Compaction(2, 8, 8, 3))
    sessions._records["s"] = record
    kv = SimpleNamespace(kv_committed_len=length, holds_kv=length > 0)
    return SimpleNamespace(
        sessions=sessions,
        shape=SimpleNamespace(attention_layers=(0, 1), kv_heads=HEADS),
        tree=SimpleNamespace(session=SimpleNamespace(slots={"s": SimpleNamespace(kv=kv)})),
        start_of=lambda _: state.start if state else 0,
    )


def counts(answer: dict[str, Any]) -> list[int]:
    return np.frombuffer(base64.b64decode(answer["kept"]), dtype="<u2").tolist()


def test_each_token_counts_the_layers_and_heads_that_hold_it() -> None:
    state = KvState(row=1, slot=1, policy="agentkv", start=5, kept=kept())
    answer = kv_map.answer(runtime(state=state), "s")
    assert counts(answer) == [3, 0, 1, 0, 0, 0, 4, 4, 4, 4] and answer["levels"] == LAYERS * HEADS
    assert sum(counts(answer)) == answer["held"] * answer["levels"] and answer["held"] + answer["evicted"] == 10
    assert (answer["status"], answer["state"], answer["layer"], answer["layers"]) == (200, "idle", None, LAYERS)


@pytest.mark.parametrize("layer, expected", [(0, [2, 0, 0]), (1, [1, 0, 1])])
def test_one_layer_counts_its_heads(layer: int, expected: list[int]) -> None:
    state = KvState(row=1, slot=1, policy="agentkv", start=5, kept=kept())
    answer = kv_map.answer(runtime(state=state), "s", layer)
    assert counts(answer) == [*expected, 0, 0, 0, 2, 2, 2, 2]
    assert (answer["levels"], answer["layer"]) == (HEADS, layer)


@pytest.mark.parametrize("state", [None, KvState(row=1, slot=1, policy="agentkv")])
def test_a_session_that_was_never_compressed_holds_everything(state: KvState | None) -> None:
    answer = kv_map.answer(runtime(state=state), "s")
    assert counts(answer) == [LAYERS * HEADS] * 10 and (answer["held"], answer["evicted"]) == (10, 0)


def test_a_lost_session_holds_nothing_and_keeps_its_history() -> None:
    answer = kv_map.answer(runtime(length=0), "s")
    assert (answer["state"], answer["held"], counts(answer)) == ("lost", 0, [])
    (turn,) = answer["turns"]
    assert turn["epoch"] == 2 and turn["budget"] == 5 and turn["phases"] == FACTS.phases and turn["state"] == "new"
    assert answer["compactions"] == [{"epoch": 2, "length": 8, "before": 8, "after": 3}]


def test_a_running_session_is_said_to_run() -> None:
    assert kv_map.answer(runtime(running="rid"), "s")["state"] == "running"


def test_what_cannot_be_answered_is_said() -> None:
    assert kv_map.answer(None, "s")["status"] == 404
    assert kv_map.answer(runtime(), "other")["status"] == 404
    for layer in (-2, LAYERS):
        assert kv_map.answer(runtime(), "s", layer)["status"] == 400


@pytest.mark.parametrize("rid", [None, "", "0123456789abcdef"])
def test_questions_that_are_not_ours_are_sglangs(rid: str | None) -> None:
    asked = SimpleNamespace(rid=rid)
    assert kv_map.around_get_internal_state(lambda *_: "stock", None, asked) == "stock"


def test_a_session_remembers_a_bounded_history_and_forgets_it_when_closed() -> None:
    sessions = SessionTable(100.0, lambda: 0.0)
    record = sessions._records["s"] = SessionRecord("s", 0, 0.0)
    for epoch in range(1000):
        record.turns.append(FinishedTurn(epoch, 0, "full", 0, FACTS))
        record.compactions.append(Compaction(epoch, 1, 1, 1))
    assert len(record.turns) == len(record.compactions) < 1000 and record.turns[-1].epoch == 999
    sessions.close("s", "evicted")
    assert record.turns
    sessions.close("s")
    assert not record.turns and not record.compactions


@pytest.mark.parametrize("query", [b"", b"layer=1", b"session=s&layer=x", b"session=s&layer=" + b"9" * 5000])
async def test_a_question_that_cannot_be_read_stays_outside_of_the_scheduler(query: bytes) -> None:
    reply = await kv_map.kv_map(Request({"type": "http", "query_string": query, "headers": []}))
    assert reply.status_code == 400 and b"session=KEY" in reply.body
