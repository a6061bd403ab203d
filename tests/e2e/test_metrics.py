"""A worker's metrics on SGLang's own endpoint say what its replies say."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest
from fleet import Arena
from prometheus_client.parser import text_string_to_metric_families
from server import Server
from transcripts import random_steps

from agentkv_serve.phase_tagger import Label

pytestmark = pytest.mark.engine
PHASES = ("others", "think", "act", "tool")


class Scrape:
    """Ours of the numbers on /metrics."""

    def __init__(self, server: Server) -> None:
        self.text = server.client.get("/metrics").text
        self.values: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                if sample.name.startswith("agentkv_"):
                    self.values["/".join([sample.name, *sample.labels.values()])] = sample.value

    def since(self, before: Scrape, *names: str) -> list[float]:
        return [self.values[name] - before.values[name] for name in names]


def test_metrics_equal_the_facts_of_the_replies(arena: Arena) -> None:
    before = Scrape(arena.server)
    assert before.values["agentkv_auxiliary_bytes"] > 0
    compactions = 0
    with arena.duel(128) as duel:
        for step in random_steps([500, 200], [150, 40], seed=60):
            one = duel.play(step)
            compactions += len(one.dumps)
            now, facts = Scrape(arena.server), one.reply.facts
            held = now.since(before, *(f"agentkv_held_tokens/{phase}" for phase in PHASES))
            lost = now.since(before, *(f"agentkv_evicted_tokens/{phase}" for phase in PHASES))
            assert dict(zip(PHASES, held, strict=True)) == pytest.approx(facts["phases"], abs=1e-6)
            assert (sum(held), sum(lost)) == pytest.approx((facts["held"], facts["evicted"]), abs=0.01)
            assert min(lost) >= 0 and facts["evicted"] > 0
            assert now.since(before, "agentkv_compactions_total", "agentkv_compaction_seconds_count") == [
                compactions,
                compactions,
            ]
            assert now.since(before, "agentkv_sessions/idle", "agentkv_sessions/live") == [1, 0]
        assert compactions >= 3
        assert duel.conversation.key not in now.text
        # The client edits its history: the next turn's whole prompt is computed anew.
        duel.conversation.ids[5] += 1
        duel.conversation.extend([9, 8, 7], Label.TOOL)
        reply = duel.conversation.send(4, ignore_eos=True)
        assert (reply.facts["state"], reply.facts["reason"]) == ("rebuilt", "diverged")
        assert Scrape(arena.server).since(before, "agentkv_rebuilds_total/diverged") == [1]
    gauges = [f"agentkv_{name}_tokens/{phase}" for name in ("held", "evicted") for phase in PHASES]
    gone = pytest.approx([0.0] * 9, abs=1e-6)
    for _ in range(100):  # the reply to a close does not wait for the scheduler
        after = Scrape(arena.server).since(before, *gauges, "agentkv_sessions/idle")
        if after == gone:
            break
        time.sleep(0.1)
    assert after == gone
