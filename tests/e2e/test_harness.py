"""The engine does what the evaluation says: a recorded run, forced through the server, gives the replay's numbers.

Log-probabilities of every generated token, points of compaction and keep-sets, for four policies.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fleet import Fleet
from server import Conversation, Server

from agentkv_serve.engine.policies import get_policy
from agentkv_serve.evaluation.decoder import Decoder
from agentkv_serve.evaluation.meter import Meter
from agentkv_serve.evaluation.replay import replay
from agentkv_serve.evaluation.session import Arm, Session
from agentkv_serve.evaluation.trajectory import Trajectory
from agentkv_serve.phase_tagger import ChatFormat, Label, render_prompt

sys.path.append(str(Path(__file__).parents[2]))
from tests.evaluation import runs

pytestmark = [pytest.mark.engine, pytest.mark.long]
POLICIES = ("agentkv", "agentkv_paper", "recent", "agentkv_plus")
CHUNK = 128
FLAGS = ("--chunked-prefill-size", str(CHUNK), "--agentkv-allow-forced", "--agentkv-policies", ",".join(POLICIES))
TIES = 0.002
"""Largest share of kept entries that equal scores may leave open."""


def as_sampled(chat: ChatFormat, trajectory: Trajectory) -> Trajectory:
    """With the labels that the decode automaton gives: it knows a marker of several tokens only at its end."""
    automaton = chat.automaton(render_prompt(chat, runs.messages(1)).family)
    labels = trajectory.labels.copy()
    for span in trajectory.spans:
        state = automaton.initial["start"]
        for place in range(span.start, span.end if span.generated else span.start):
            labels[place], state = (
                automaton.label[state, trajectory.ids[place]],
                automaton.next[state, trajectory.ids[place]],
            )
    return replace(trajectory, labels=labels)


def force(server: Server, chat: ChatFormat, trajectory: Trajectory, policy: str, budget: int) -> tuple[list, str]:
    """[(token, log-probability)] of all generated tokens as the server computes them, and the session's key."""
    family = render_prompt(chat, runs.messages(1)).family
    talk = Conversation(server, budget, family, policy, salt=uuid.uuid4().hex)
    found = []
    for span in trajectory.spans:
        ids = trajectory.ids[span.start : span.end].tolist()
        labels = [Label(int(label)) for label in trajectory.labels[span.start : span.end]]
        if not span.generated:
            talk.ids, talk.labels = talk.ids + ids, talk.labels + labels
            continue
        reply = talk.send(len(ids), sampled=labels, agentkv={"force_ids": ids}, logprobs=True, ignore_eos=True)
        assert reply.output_ids == ids
        content = reply.body["choices"][0]["logprobs"]["content"]
        assert len(content) == len(ids), "every generated position gave a number"
        found += zip(range(span.start, span.end), (entry["logprob"] for entry in content), strict=True)
    return found, talk.key


def replayed(decoder: Decoder, trajectory: Trajectory, policy: str, budget: int) -> tuple[Session, Meter, list]:
    """The harness's run, and what it kept at every compaction."""
    session = Session(decoder, Arm(policy, get_policy(policy), budget), trajectory.labels, trajectory.name)
    meter = Meter(decoder, trajectory, [session])
    kept = []
    for step in replay(decoder, trajectory, [session], chunk=CHUNK, watch=meter.watch):
        if len(session.compactions) > len(kept):
            assert session.positions is not None
            kept.append(session.positions.numpy())
        meter.take(step)
    if len(session.compactions) > len(kept):
        assert session.positions is not None
        kept.append(session.positions.numpy())
    return session, meter, kept


def assert_same(server: Server, folder: Path, trajectory: Trajectory, policy: str, budget: int, noise: float) -> None:
    chat = ChatFormat.from_folder(folder)
    trajectory = as_sampled(chat, trajectory)
    decoder, _ = runs.model(folder)
    session, meter, kept = replayed(decoder, trajectory, policy, budget)
    logprobs, key = force(server, chat, trajectory, policy, budget)

    dumps = [np.load(file) for file in sorted(server.dumps.glob(f"[0-9]*-{key[:16]}.npz"))]
    assert [int(dump["length"]) for dump in dumps] == session.compactions
    assert len(session.compactions) > 5
    for dump, expected in zip(dumps, kept, strict=True):
        differs = sum(
            len(np.setdiff1d(theirs, ours)) for theirs, ours in zip(_heads(dump["kept"]), _heads(expected), strict=True)
        )
        assert differs <= TIES * expected.size

    for label in (Label.ACT, Label.SAY):
        places = [place for place, _ in logprobs if trajectory.labels[place] == label]
        ours = -meter.tracks[0].nll[places]
        theirs = np.array([value for place, value in logprobs if trajectory.labels[place] == label])
        assert len(places) > 20
        np.testing.assert_allclose(theirs, ours, atol=noise, rtol=0)
        assert abs(theirs.mean() - ours.mean()) < noise / 4


def _heads(kept: np.ndarray) -> np.ndarray:
    return kept.reshape(-1, kept.shape[-1])


@pytest.mark.parametrize("policy", POLICIES)
def test_tiny(fleet: Fleet, tiny: Callable[..., Path], policy: str) -> None:
    folder = tiny("llama-gqa")
    server = fleet.agentkv(folder, "--max-total-tokens", "8192", *FLAGS).wait()
    assert_same(server, folder, runs.trajectory(folder, turns=6), policy, budget=200, noise=5e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_smollm2(fleet: Fleet, smollm2: Path, policy: str) -> None:
    server = fleet.agentkv(smollm2, "--max-total-tokens", "16384", *FLAGS).wait()
    assert_same(server, smollm2, runs.trajectory(smollm2, turns=8), policy, budget=128, noise=5e-3)
