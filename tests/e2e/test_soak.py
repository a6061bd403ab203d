"""Three hundred random turns of twelve sessions in a pool that holds a third of their text.

Random budgets, aborts, closes, branches and forced retractions; nothing may fail but as documented, every token must
follow from what the session held, and the pool and the process come back to where they were.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from duel import read_dumps
from fleet import PAGED, Arena, Fleet
from oracle import recorded
from server import Conversation, Reply, ServerError
from transcripts import random_steps

pytestmark = [pytest.mark.engine, pytest.mark.long]
SESSIONS, TURNS, THREADS, LENGTH = 12, 300, 4, 1500
POOL = SESSIONS * LENGTH // 3 // 16 * 16
DOCUMENTED = ("agentkv:no_room", "agentkv:session_busy")


@dataclass(frozen=True)
class Played:
    """A finished turn, to be checked afterwards."""

    ids: list[int]  # of the whole session
    sampled: int
    facts: dict[str, Any]
    events: list[recorded.Event]

    def check(self, before: list[int], held: recorded.Held) -> recorded.Held:
        """The state after the turn. `before`: the session's tokens when `held` was its state."""
        if self.facts["state"] == "resumed":
            return recorded.check_turn(held, self.ids, self.sampled, self.events)
        known = recorded.Held(held.model)
        if self.facts["reason"] == "retracted" and self.ids[: len(before)] == before and len(before) < len(self.ids):
            known = held
        # The record may begin with compactions of an aborted turn that ended after its client had left.
        return recorded.check_restarted(known, self.ids, self.sampled, self.events, self.facts["held"])


@dataclass
class Track:
    """What one session did, to be replayed afterwards."""

    conversation: Conversation
    generator: random.Random
    turns: list[Played] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # lengths to which it may branch back
    dumps: int = 0
    reasons: list[str] = field(default_factory=list)

    def act(self, number: int) -> None:
        """One random thing."""
        conversation, generator = self.conversation, self.generator
        if len(conversation.ids) > LENGTH:
            conversation.close()
            del conversation.ids[:], conversation.labels[:], self.ends[:]
        elif self.ends and generator.random() < 0.08:
            cut = generator.choice(self.ends)
            del conversation.ids[cut:], conversation.labels[cut:]
            self.ends = [end for end in self.ends if end <= cut]
        elif generator.random() < 0.05:
            conversation.close()
        conversation.budget = generator.choice([0, 128, 128, 160, 256, 4096])
        size = generator.randrange(1, 300) if conversation.ids else generator.randrange(100, 600)
        step = random_steps([size], [generator.randrange(1, 200)], seed=number)[0]
        if generator.random() < 0.12:
            with conversation.running(step.pieces, step.max_tokens) as turn:
                turn.read(generator.randrange(1, step.max_tokens + 1))
                if generator.random() < 0.5:
                    turn.abort()
            self._events()
            return
        for label, ids in step.pieces:
            conversation.extend(ids, label)
        prompt = len(conversation.ids)
        try:
            reply = conversation.send(step.max_tokens, step.initial, ignore_eos=True)
        except ServerError as error:
            assert any(code in error.text for code in DOCUMENTED), error
            del conversation.ids[prompt - size :], conversation.labels[prompt - size :]
            self.reasons.append("refused")
            self._events()
            return
        self._note(reply)

    def _note(self, reply: Reply) -> None:
        ids = list(self.conversation.ids)
        self.ends.append(len(ids))
        if reply.facts["state"] != "resumed":
            self.reasons.append(str(reply.facts["reason"]))
        self.turns.append(Played(ids, len(reply.output_ids), reply.facts, self._events()))

    def _events(self) -> list[recorded.Event]:
        dumps = read_dumps(self.conversation.server.dumps, self.conversation.key)[self.dumps :]
        self.dumps += len(dumps)
        return [recorded.Event(dump.length, dump.old_start, dump.kept) for dump in dumps]


def resident(pid: int) -> int:
    """MiB of the process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 >> 20


def run(tracks: list[Track], turns: range) -> None:
    """Four at a time, no session twice at once."""
    pending, lock, failures = list(turns), threading.Lock(), []
    busy = [threading.Lock() for _ in tracks]

    def work() -> None:
        while True:
            with lock:
                if not pending or failures:
                    return
                number = pending.pop(0)
            place = number % len(tracks)
            with busy[place]:
                try:
                    tracks[place].act(number)
                except BaseException as error:
                    failures.append(error)
                    raise

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_soak(module_fleet: Fleet, tiny: Callable[..., Path]) -> None:
    folder = tiny("llama-gqa")
    flags = [str(POOL) if flag == "16384" else flag for flag in PAGED]
    server = module_fleet.agentkv(folder, *flags, SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="97")
    arena = Arena.of(server, folder)
    tracks = [Track(Conversation(server, salt="soak"), random.Random(number)) for number in range(SESSIONS)]
    run(tracks, range(60))
    before = resident(server.process.pid)
    run(tracks, range(60, TURNS))
    assert resident(server.process.pid) < before * 1.05 + 32
    for track in tracks:
        track.conversation.close()
    assert server.client.post("/flush_cache").status_code == 200
    reasons = {reason for track in tracks for reason in track.reasons}
    assert {"diverged", "retracted"} <= reasons
    played = 0
    for track in tracks:
        held, before = recorded.Held(arena.model), []
        for turn in track.turns:
            held, before = turn.check(before, held), turn.ids
            played += 1
    assert played > 0.7 * TURNS
