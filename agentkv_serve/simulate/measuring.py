"""Measures the times of one worker that a simulation starts from."""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from agentkv_serve import __version__
from agentkv_serve.bench.report import machine
from agentkv_serve.simulate.parameters import Parameters, Service, Workload

PROMPTS = (128, 512, 1024, 2048)
BATCHES = ((1, 256), (1, 2048), (4, 256), (4, 1024), (8, 256))  # turns at once, KV tokens of each
STEPS = 24
AGENTS = Workload(
    first_tokens=(1800.0, 4000.0),
    new_tokens=(180.0, 900.0),
    output_tokens=(60.0, 250.0),
    pause=(2.0, 20.0),
    turns=12.0,
)
"""A tool-calling support agent: token counts as in the run that `agentkv demo` replays; pauses and the number of turns
are assumptions, to be replaced by your own."""


def measured(url: str, model_path: Path, key: str, repeats: int) -> Parameters:
    """The parameters of the worker at `url`, which must be idle."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False) as http:
        info = http.get("/server_info").raise_for_status().json()
        words = json.loads((model_path / "config.json").read_text())["vocab_size"]
        # The fastest of each kind: whatever else the machine does only ever makes a run longer.
        prefills = [(n, min(_time_to_first(http, n, words) for _ in range(repeats))) for n in PROMPTS]
        steps = [(b, held, min(_step(http, b, held, words) for _ in range(repeats))) for b, held in BATCHES]
    token, base = np.polyfit([n for n, _ in prefills], [seconds for _, seconds in prefills], 1)
    design = np.array([[1.0, b, b * (held + STEPS / 2)] for b, held, _ in steps])
    fit, *_ = np.linalg.lstsq(design, np.array([seconds for *_, seconds in steps]), rcond=None)
    state = info["internal_states"][0]
    service = Service(
        prefill_base=max(0.0, float(base)),
        prefill_token=max(0.0, float(token)),
        step_base=max(1e-6, float(fit[0])),
        step_row=max(0.0, float(fit[1])),
        step_kv=max(0.0, float(fit[2])),
        pool_tokens=int(info["max_total_num_tokens"]),
        max_running=int(state["effective_max_running_requests_per_dp"]),
    )
    about = machine()
    source = {
        "model": model_path.name,
        "machine": f"{about['cores']} cores of {about['cpu']}, GPU {about['gpu'] or 'none'}",
        "software": f"agentkv-serve {__version__}, sglang {about.get('sglang', '?')}",
        "command": f"agentkv simulate measure, the fastest of {repeats} runs of each kind",
        "date": datetime.date.today().isoformat(),
        "fit": f"median miss: prefill {_miss(prefills, service):.0%}, steps {_miss_steps(steps, service):.0%}",
    }
    return Parameters(source, service, AGENTS)


def _generate(http: httpx.Client, tokens: int, output: int, words: int) -> tuple[float, float, float]:
    """One greedy generation from random tokens. Returns the times of its sending, first and last token."""
    ids = np.random.default_rng().integers(10, words - 10, tokens).tolist()
    sampling = {"max_new_tokens": output, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "stream": True, "rid": uuid.uuid4().hex}
    sent = time.perf_counter()
    first = last = 0.0
    with http.stream("POST", "/generate", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                last = time.perf_counter()
                first = first or last
    return sent, first, last


def _time_to_first(http: httpx.Client, tokens: int, words: int) -> float:
    sent, first, _ = _generate(http, tokens, 1, words)
    return first - sent


def _step(http: httpx.Client, batch: int, held: int, words: int) -> float:
    """Seconds of a decode step while `batch` turns that hold `held` tokens each decode together."""
    # Prefills come one after another: the last turn to start has all others beside it if they run long enough.
    ahead = [STEPS * (1 + batch - i) for i in range(batch)]
    with concurrent.futures.ThreadPoolExecutor(batch) as pool:
        runs = list(pool.map(lambda output: (_generate(http, held, output, words), output), ahead))
    (_, first, last), output = max(runs, key=lambda run: run[0][1])
    return float((last - first) / (output - 1))


def _miss(prefills: list[tuple[int, float]], service: Service) -> float:
    return statistics.median(abs(service.prefill(n) / seconds - 1) for n, seconds in prefills)


def _miss_steps(steps: list[tuple[int, int, float]], service: Service) -> float:
    return statistics.median(abs(service.step(b, b * (held + STEPS / 2)) / seconds - 1) for b, held, seconds in steps)
