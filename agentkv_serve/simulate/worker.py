"""One simulated worker: a KV pool, prefills in order of arrival, a decode batch that shares the steps."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from agentkv_serve.simulate.parameters import Service


@dataclass(eq=False, slots=True)
class Agent:
    """A session. `worker` holds `held` KV tokens of it while `resident`."""

    turns_left: int
    logical: int = 0
    held: int = 0
    worker: int = -1
    resident: bool = False
    # The turn that runs or waits.
    arrived: float = 0.0
    new: int = 0
    output: int = 0
    prefill: int = 0
    need: int = 0
    tries: int = 0  # times that a turn was begun

    def after(self, budget: int) -> int:
        """KV tokens that the session holds after the turn."""
        tokens = self.logical + self.new + self.output
        return min(tokens, budget) if budget else tokens


@dataclass(eq=False, slots=True)
class Worker:
    """`clock` counts decode steps: a turn of m output tokens that joins at clock v ends at v + m.

    Every change of the batch moves the clock first (`advance`), since the time of a step depends on the batch.
    """

    service: Service
    number: int
    alive: bool = True
    used: int = 0
    idle: OrderedDict[int, Agent] = field(default_factory=OrderedDict)  # least recently used first
    waiting: deque[Agent] = field(default_factory=deque)
    batch: list[tuple[float, int, Agent]] = field(default_factory=list)
    prefilling: int = 0
    batch_held: int = 0
    clock: float = 0.0
    seen: float = 0.0
    prefill_until: float = 0.0
    version: int = 0
    joined: int = 0

    def step(self) -> float:
        """Seconds of a decode step now."""
        return self.service.step(len(self.batch), self.batch_held)

    def advance(self, now: float) -> None:
        """Moves the clock to `now`. Decoding stood still until `prefill_until`."""
        if self.batch:
            decoding = now - max(self.seen, min(now, self.prefill_until))
            self.clock += max(0.0, decoding) / self.step()
        self.seen = now

    def next_end(self, now: float) -> float | None:
        """When the batch's next turn ends, if nothing changes."""
        if not self.batch:
            return None
        return max(now, self.prefill_until) + max(0.0, self.batch[0][0] - self.clock) * self.step()

    def make_room(self, agent: Agent) -> list[Agent] | None:
        """Takes the KV tokens that the agent's turn needs; idle sessions give way, least recently used first.

        Returns the sessions that gave way; None, with nothing taken but theirs, when running turns hold the rest.
        """
        gone: list[Agent] = []
        if self.running >= self.service.max_running:
            return None
        self.idle.pop(id(agent), None)
        own = agent.held if agent.resident else 0
        while self.used - own + agent.need > self.service.pool_tokens and self.idle:
            _, other = self.idle.popitem(last=False)
            self.used -= other.held
            other.resident, other.held = False, 0
            gone.append(other)
        if self.used - own + agent.need > self.service.pool_tokens:
            if agent.resident:
                self.idle[id(agent)] = agent
            return None
        self.used += agent.need - own
        return gone

    @property
    def running(self) -> int:
        """Turns in prefill or in the batch."""
        return len(self.batch) + self.prefilling

    def begin_prefill(self, now: float, seconds: float) -> float:
        """Queues a prefill; returns its end."""
        self.advance(now)
        self.prefilling += 1
        self.prefill_until = max(now, self.prefill_until) + seconds
        return self.prefill_until

    def join(self, now: float, agent: Agent) -> None:
        """A prefilled turn joins the batch."""
        self.advance(now)
        self.prefilling -= 1
        self.joined += 1
        heapq.heappush(self.batch, (self.clock + agent.output, self.joined, agent))
        self.batch_held += agent.need

    def leave(self, now: float) -> Agent:
        """The batch's first turn ends."""
        self.advance(now)
        self.clock = max(self.clock, self.batch[0][0])
        _, _, agent = heapq.heappop(self.batch)
        self.batch_held -= agent.need
        return agent
