"""Two gateway processes, a real Valkey and three workers, any of which is killed at any moment."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentkv_serve.children import free_port
from tests.gateway.engine_process import answer
from tests.gateway.valkey import ValkeyProcess

ROOT = Path(__file__).parents[2]
TURN_BOUND = 25.0  # seconds within which a turn, retries included, must be answered
TURNS = 6
AGENTS = 4


class Process:
    """A child that can be killed and started again on its port."""

    def __init__(self, command: list[str], port: int, ready: str, log: Path) -> None:
        self.command = command
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self._ready = self.url + ready
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=log, env=dict(os.environ))

    def await_ready(self) -> None:
        for _ in range(1200):
            try:
                if httpx.get(self._ready, timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert self._child and self._child.poll() is None, f"{self.command} ended"
            time.sleep(0.05)
        raise AssertionError(f"{self.command} is not ready")

    def kill(self) -> None:
        if self._child:
            self._child.send_signal(signal.SIGKILL)
            self._child.wait()
            self._child = None


class Fleet:
    """Everything that runs."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.valkey = ValkeyProcess()
        ports = [free_port() for _ in range(5)]
        engine = [sys.executable, "-m", "tests.gateway.engine_process"]
        self.workers = [
            Process([*engine, str(port), str(folder)], port, "/health", logs / f"{port}") for port in ports[:3]
        ]
        flags = ["--model-path", str(folder), "--log-level", "error"]
        for worker in self.workers:
            flags += ["--worker", worker.url]
        for setting in (
            f"store.url={self.valkey.url}",
            "store.timeout=0.25",
            "store.lease=2",
            "secret=one-secret-for-both",
            "sessions.busy_wait=4",
            "routing.health_interval=0.3",
            "routing.breaker_rest=0.5",
            "upstream.silence=5",
            "upstream.abort=1",
        ):
            flags += ["--set", setting]
        gateway = [sys.executable, "-m", "agentkv_serve", "gateway", *flags]
        self.gateways = [
            Process([*gateway, "--port", str(port)], port, "/readyz", logs / f"{port}") for port in ports[3:]
        ]

    def start(self) -> None:
        self.valkey.start()
        for process in self.workers:
            process.start()
        for process in self.workers:
            process.await_ready()
        for process in self.gateways:
            process.start()
        for process in self.gateways:
            process.await_ready()

    def stop(self) -> None:
        for process in [*self.gateways, *self.workers]:
            process.kill()
        self.valkey.kill()


@pytest.fixture(scope="module")
def fleet(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(model_folder, tmp_path_factory.mktemp("logs"))
    running.start()
    yield running
    running.stop()


class Agent:
    """A client behind a load balancer: tries any gateway until its turn is answered."""

    def __init__(self, fleet: Fleet, name: str, rng: random.Random, http: httpx.AsyncClient) -> None:
        self.fleet, self.name, self.rng, self.http = fleet, name, rng, http
        self.streamed, self.named = rng.random() < 0.5, rng.random() < 0.7
        self.states: list[str] = []
        self.slowest = 0.0

    async def run(self) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"agent-{self.name} turn-{turn}"})
            said = await self._turn(messages)
            assert said == answer(self.name, turn), said
            messages.append({"role": "assistant", "content": said})
            await asyncio.sleep(self.rng.random() * 0.05)

    async def _turn(self, messages: list[dict[str, Any]]) -> str:
        started = time.monotonic()
        while True:
            gateway = self.rng.choice(self.fleet.gateways)
            said = await self._try(gateway.url, messages)
            waited = time.monotonic() - started
            self.slowest = max(self.slowest, waited)
            if said is not None:
                return said
            assert waited < TURN_BOUND, f"agent {self.name} was not answered"
            await asyncio.sleep(0.1)

    async def _try(self, url: str, messages: list[dict[str, Any]]) -> str | None:
        body = {"model": "tiny", "messages": messages, "stream": self.streamed}
        headers = {"X-AgentKV-Session": f"s-{self.name}"} if self.named else {}
        try:
            reply = await self.http.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError:
            return None
        if reply.status_code in (409, 502, 503):
            return None
        assert reply.status_code == 200, reply.text + "\n".join(g.log.read_text()[-4000:] for g in self.fleet.gateways)
        if not self.streamed:
            self.states.append(reply.json()["usage"]["agentkv"]["state"])
            return str(reply.json()["choices"][0]["message"]["content"])
        if "[DONE]" not in reply.text:
            return None
        self.states.append(reply.headers["x-agentkv-session-state"])
        frames = [f[6:] for f in reply.text.split("\n\n") if f.startswith("data: {")]
        deltas = [
            c["delta"].get("content") or "" for f in frames for c in httpx.Response(200, text=f).json()["choices"]
        ]
        return "".join(deltas)


async def schedule(fleet: Fleet, seed: int) -> tuple[list[Agent], str]:
    """Agents talk while something is killed at a random moment and started again."""
    rng = random.Random(seed)
    victim = rng.choice(["worker", "gateway", "valkey"])
    async with httpx.AsyncClient(timeout=TURN_BOUND) as http:
        agents = [Agent(fleet, f"{seed}x{i}", rng, http) for i in range(AGENTS)]
        running = asyncio.gather(*(agent.run() for agent in agents))
        await asyncio.sleep(rng.random() * 0.8)
        pause = rng.choice([0.05, 0.3, 0.8])
        if victim == "valkey":
            fleet.valkey.kill()
            await asyncio.sleep(pause)
            await asyncio.to_thread(fleet.valkey.start)
        else:
            process = rng.choice(fleet.workers if victim == "worker" else fleet.gateways)
            process.kill()
            await asyncio.sleep(pause)
            process.start()
            await asyncio.to_thread(process.await_ready)
        await running
    return agents, victim


async def go_through(fleet: Fleet, seeds: range) -> None:
    slowest, states = 0.0, []
    for seed in seeds:
        agents, victim = await schedule(fleet, seed)
        for agent in agents:
            assert len(agent.states) == TURNS, (seed, victim)
            states += agent.states
            slowest = max(slowest, agent.slowest)
    print(f"slowest turn {slowest:.1f} s; states { ({s: states.count(s) for s in sorted(set(states))}) }")


@pytest.mark.long
async def test_sessions_survive_whatever_is_killed(fleet: Fleet) -> None:
    await go_through(fleet, range(2))


@pytest.mark.long
async def test_sessions_survive_two_hundred_schedules(fleet: Fleet) -> None:
    await go_through(fleet, range(1000, 1200))
