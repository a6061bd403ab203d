"""The simulation: agents arrive, work turn by turn with pauses, and share a fleet of workers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentkv_serve.simulate.parameters import Parameters
from agentkv_serve.simulate.worker import Agent, Worker

WARM_UP = 0.25
"""Share of the time that is simulated but not counted: the fleet begins empty."""
_ARRIVE, _TURN, _PREFILLED, _END, _LEAVE, _SAMPLE = range(6)
_SAMPLES = 200


@dataclass(frozen=True)
class Scenario:
    """One run. `budget` 0 keeps everything. `arrivals`: new agents per worker and minute. `leaving`: share of the
    workers that are lost at half time; their sessions go on elsewhere."""

    workers: int
    budget: int
    arrivals: float
    minutes: float
    leaving: float = 0.0
    seed: int = 0


@dataclass
class Tally:
    """What was counted after the warm-up. Times in seconds."""

    turns: int = 0
    resumed: int = 0
    rebuilt: int = 0
    moved: int = 0
    prompt: int = 0
    prefilled: int = 0
    output: int = 0
    refused: int = 0
    gave_way: int = 0
    queued: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    pool: list[float] = field(default_factory=list)
    series: list[tuple[float, float, int]] = field(default_factory=list)  # time, pool use, waiting turns


class Fleet:
    """Runs one scenario."""

    def __init__(self, parameters: Parameters, scenario: Scenario) -> None:
        self.p, self.s = parameters, scenario
        self._random = np.random.default_rng(scenario.seed)
        self._workers = [Worker(parameters.service, number) for number in range(scenario.workers)]
        self._events: list[tuple[float, int, int, Any]] = []
        self._count = 0
        # Workers by the KV tokens that they hold; an entry is stale when the worker's load has changed since.
        self._light = [(0, worker.number) for worker in self._workers]
        self._now = 0.0
        self._end = scenario.minutes * 60
        self._pools: dict[str, list[float]] = {}
        self.tally = Tally()

    def run(self) -> Tally:
        """Simulates to the end of the scenario's time."""
        self._push(self._gap(), _ARRIVE, None)
        for i in range(1, _SAMPLES + 1):
            self._push(self._end * i / _SAMPLES, _SAMPLE, None)
        if self.s.leaving:
            self._push(self._end / 2, _LEAVE, None)
        act: dict[int, Callable[[Any], None]] = {
            _ARRIVE: self._arrive,
            _TURN: self._turn,
            _PREFILLED: self._prefilled,
            _END: self._turn_ends,
            _LEAVE: self._workers_leave,
            _SAMPLE: self._sample,
        }
        while self._events and self._events[0][0] <= self._end:
            self._now, _, kind, what = heapq.heappop(self._events)
            act[kind](what)
        return self.tally

    @property
    def _counted(self) -> bool:
        return self._now >= WARM_UP * self._end

    def _push(self, at: float, kind: int, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, kind, what))

    # ---- agents -------------------------------------------------------------------------------------------

    def _gap(self) -> float:
        return self._now + float(self._random.exponential(60 / (self.s.arrivals * self.s.workers)))

    def _draw(self, name: str) -> float:
        """A value of one of the workload's log-normal distributions; drawn in blocks, since numpy is slow singly."""
        values = self._pools.get(name)
        if not values:
            median, high = getattr(self.p.workload, name)
            spread = math.log(high / median) / 1.6449
            values = self._random.lognormal(math.log(median), spread, 4096).tolist()
            self._pools[name] = values
        return float(values.pop())

    def _arrive(self, _: None) -> None:
        self._push(self._gap(), _ARRIVE, None)
        turns = int(self._random.geometric(1 / self.p.workload.turns))
        self._begin(Agent(turns_left=turns), round(self._draw("first_tokens")))

    def _turn(self, agent: Agent) -> None:
        self._begin(agent, round(self._draw("new_tokens")))

    def _begin(self, agent: Agent, new: int) -> None:
        agent.new = max(1, new)
        agent.output = max(1, round(self._draw("output_tokens")))
        agent.arrived = self._now
        self._dispatch(agent)

    def _dispatch(self, agent: Agent) -> None:
        """To the worker that holds the session, else to the one that holds the fewest KV tokens."""
        service = self.p.service
        agent.need = agent.after(self.s.budget)
        if self.s.budget:
            agent.need = min(agent.logical + agent.new + agent.output, agent.need + service.slack_tokens)
        if agent.need > service.pool_tokens:
            self.tally.refused += self._counted
            return
        known = agent.worker
        if known < 0 or not self._workers[known].alive:
            agent.worker = self._lightest()
        worker = self._workers[agent.worker]
        if worker.waiting or not self._admit(worker, agent):
            worker.waiting.append(agent)

    def _admit(self, worker: Worker, agent: Agent) -> bool:
        gone = worker.make_room(agent)
        if gone is None:
            return False
        whole = agent.logical + agent.new
        agent.prefill = agent.new if agent.resident else whole
        if self._counted:
            tally = self.tally
            tally.gave_way += len(gone)
            tally.queued.append(self._now - agent.arrived)
            tally.prompt += whole
            tally.prefilled += agent.prefill
        agent.tries += 1
        end = worker.begin_prefill(self._now, self.p.service.prefill(agent.prefill))
        self._push(end, _PREFILLED, (agent, agent.tries))
        self._plan_end(worker)
        self._weigh(worker)
        return True

    # ---- workers ------------------------------------------------------------------------------------------

    def _lightest(self) -> int:
        while True:
            load, number = self._light[0]
            worker = self._workers[number]
            if worker.alive and load == worker.used:
                # A burst of new agents must not see the same worker as empty: it counts as loaded at once.
                return number
            heapq.heappop(self._light)

    def _weigh(self, worker: Worker) -> None:
        heapq.heappush(self._light, (worker.used, worker.number))
        if len(self._light) > 8 * len(self._workers) + 1024:
            self._light = [(w.used, w.number) for w in self._workers if w.alive]
            heapq.heapify(self._light)

    def _prefilled(self, what: tuple[Agent, int]) -> None:
        agent, tries = what
        if tries != agent.tries:
            return  # its worker was lost meanwhile
        worker = self._workers[agent.worker]
        worker.join(self._now, agent)
        if self._counted:
            self.tally.first_token.append(self._now - agent.arrived)
        self._plan_end(worker)

    def _plan_end(self, worker: Worker) -> None:
        worker.version += 1
        end = worker.next_end(self._now)
        if end is not None:
            self._push(end, _END, (worker, worker.version))

    def _turn_ends(self, what: tuple[Worker, int]) -> None:
        worker, version = what
        if version != worker.version or not worker.alive:
            return
        agent = worker.leave(self._now)
        self._settle(worker, agent)
        while worker.waiting and self._admit(worker, worker.waiting[0]):
            worker.waiting.popleft()
        self._plan_end(worker)
        self._weigh(worker)

    def _settle(self, worker: Worker, agent: Agent) -> None:
        if self._counted:
            tally = self.tally
            tally.turns += 1
            tally.output += agent.output
            if agent.logical:
                tally.resumed += agent.resident
                tally.rebuilt += not agent.resident
        held = agent.after(self.s.budget)
        agent.logical += agent.new + agent.output
        worker.used += held - agent.need
        agent.held, agent.resident = held, True
        agent.turns_left -= 1
        if agent.turns_left <= 0:
            worker.used -= held
            return
        worker.idle[id(agent)] = agent
        self._push(self._now + self._draw("pause"), _TURN, agent)

    def _workers_leave(self, _none: None) -> None:
        """The first workers are lost with all that they hold; what ran there begins again elsewhere."""
        leaving = self._workers[: round(self.s.leaving * len(self._workers))]
        prefilling: dict[int, list[Agent]] = {}
        for *_at, kind, what in self._events:
            if kind == _PREFILLED and what[1] == what[0].tries:
                prefilling.setdefault(what[0].worker, []).append(what[0])
        homeless: list[Agent] = []
        for worker in leaving:
            worker.alive = False
            running = [agent for _, _, agent in worker.batch] + prefilling.get(worker.number, [])
            held = {id(agent): agent for agent in (*worker.idle.values(), *worker.waiting, *running)}
            for agent in held.values():
                agent.resident, agent.held = False, 0
                agent.tries += 1
            self.tally.moved += len(held)
            homeless += [*running, *worker.waiting]
        for agent in homeless:
            self._dispatch(agent)

    def _sample(self, _: None) -> None:
        alive = [worker for worker in self._workers if worker.alive]
        use = sum(worker.used for worker in alive) / (len(alive) * self.p.service.pool_tokens)
        waiting = sum(len(worker.waiting) for worker in alive)
        self.tally.series.append((self._now, use, waiting))
        if self._counted:
            self.tally.pool.append(use)


def summary(scenario: Scenario, tally: Tally) -> dict[str, Any]:
    """The run in one row. Rates are per worker and second."""
    seconds = scenario.minutes * 60 * (1 - WARM_UP)
    returning = tally.resumed + tally.rebuilt

    def high(values: list[float], share: float) -> float:
        return float(np.quantile(values, share)) if values else 0.0

    return {
        "workers": scenario.workers,
        "budget": scenario.budget or "full",
        "arrivals": scenario.arrivals,
        "turns": tally.turns,
        "turns_per_worker_minute": 60 * tally.turns / (seconds * scenario.workers),
        "output_tokens_per_worker_second": tally.output / (seconds * scenario.workers),
        "resumed": tally.resumed / returning if returning else 0.0,
        "prompt_tokens_saved": 1 - tally.prefilled / tally.prompt if tally.prompt else 0.0,
        "queue_p50": high(tally.queued, 0.5),
        "queue_p95": high(tally.queued, 0.95),
        "first_token_p50": high(tally.first_token, 0.5),
        "first_token_p95": high(tally.first_token, 0.95),
        "pool_use": float(np.mean(tally.pool)) if tally.pool else 0.0,
        "gave_way": tally.gave_way,
        "moved": tally.moved,
        "refused": tally.refused,
    }
