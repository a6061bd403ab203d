"""`agentkv bench decode`: decode speed of one long session at a KV budget against everything kept.

One server answers all runs, interleaved and in rotating order, so that a drift of the machine meets all alike:

- `full`: no session at all, SGLang's stock attention path;
- `window`: a session whose budget is larger than its context, held on the path of compressed sessions;
- `budget`: a session compressed to the budget.

`budget / full` is what a user sees, `budget / window` what fewer keys alone bring.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from agentkv_serve.bench.report import machine, publish, spread
from agentkv_serve.children import ChildDied
from agentkv_serve.demo.recording import load_recording
from agentkv_serve.model import ModelError, check_model, default_model
from agentkv_serve.parsers import chat_template
from agentkv_serve.phase_tagger import Label, Vocabulary, detect_family
from agentkv_serve.stack import StackError, StackSettings
from agentkv_serve.up import Stopped, started, stop_signals

MODES = ("full", "window", "budget")
SKIP = 8  # first tokens of a run that are not counted: the compression of the prompt falls among them


@dataclass(frozen=True)
class Workload:
    """What every run does: `ids` as the prompt, then `tokens` sampled ones (their end is not the model's choice)."""

    url: str
    key: str
    ids: list[int]
    tokens: int
    budget: int
    family: str


@dataclass
class Run:
    """One run: when each token came (seconds), and the engine's facts ({} where it had no session)."""

    arrivals: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def gaps(self) -> list[float]:
        """Seconds between the counted tokens."""
        counted = self.arrivals[SKIP:]
        return [later - earlier for earlier, later in itertools.pairwise(counted)]

    @property
    def tok_s(self) -> float:
        """Decode speed in tokens a second, the compressions that fall due included."""
        return len(self.gaps) / sum(self.gaps)


def decode(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    context: Annotated[int, typer.Option(min=256, help="Prompt tokens.")] = 3200,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens decoded in a run.")] = 160,
    budget: Annotated[int, typer.Option(min=128, help="KV tokens per layer and KV head.")] = 512,
    pairs: Annotated[int, typer.Option(min=1, help="Runs of each mode that count.")] = 5,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face folder; default: SmolLM2-135M.")] = None,
    engine_flag: Annotated[list[str] | None, typer.Option(help="A flag for the engine, as --flag=value.")] = None,
) -> None:
    """Decode speed at a KV budget against everything kept, in one server."""
    console = Console(stderr=True)
    try:
        with stop_signals():
            folder = model.expanduser().resolve() if model else default_model(console)
            info = check_model(folder)
            if context + tokens > info.context:
                raise typer.BadParameter(f"{context} + {tokens} tokens do not fit into {info.context} of context")
            settings = StackSettings(folder, engine_flags=tuple(engine_flag or ()))
            with started(settings, console) as stack:
                vocabulary = Vocabulary(folder)
                family = detect_family(vocabulary, chat_template(folder)).name
                ids = prompt(vocabulary, context)
                work = Workload(stack.engine_urls[0], stack.engine_key, ids, tokens, budget, family)
                runs = measure(work, pairs, console)
    except Stopped:
        raise typer.Exit(130) from None
    except (ModelError, StackError, ChildDied) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    threads = os.environ.get("OMP_NUM_THREADS")
    setting = {"model": folder.name, "dtype": info.dtype, "context": context, "tokens": tokens, "budget": budget}
    setting |= {"pairs": pairs, "skipped_tokens": SKIP, "omp_num_threads": threads, "engine_flags": engine_flag or []}
    publish({**results(runs, context, tokens), "configuration": setting, "machine": machine()}, "decode", as_json)


def measure(work: Workload, pairs: int, console: Console) -> dict[str, list[Run]]:
    """Runs every mode `pairs` times after one uncounted round.

    Raises:
        StackError: a session did not hold what its budget says.
    """
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    headers = {"authorization": f"Bearer {work.key}"}
    with httpx.Client(base_url=work.url, headers=headers, timeout=600, trust_env=False) as client:
        for number in range(pairs + 1):
            for mode in (MODES[(number + i) % len(MODES)] for i in range(len(MODES))):
                run = once(client, work, mode)
                check_held(run, work, mode)
                if number:
                    runs[mode].append(run)
                name = f"{number}/{pairs}" if number else "warm-up"
                console.print(f"{name} {mode}: {run.tok_s:.2f} tok/s")
    return runs


def once(client: httpx.Client, work: Workload, mode: str) -> Run:
    """One run of one mode, as a new session that is closed afterwards.

    Raises:
        StackError: the engine refused it.
    """
    session = uuid.uuid4().hex
    sampling: dict[str, Any] = {"max_new_tokens": work.tokens, "temperature": 0, "ignore_eos": True}
    if mode != "full":
        sampling["custom_params"] = {"agentkv": json.dumps(turn(work, session, mode))}
    body = {"input_ids": work.ids, "sampling_params": sampling, "stream": True}
    run, seen = Run(), 0
    with client.stream("POST", "/generate", json=body) as reply:
        if reply.status_code != 200:
            raise StackError(f"the engine refused a run: {reply.read().decode()}")
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            frame = json.loads(line.removeprefix("data: "))
            if "error" in frame:
                raise StackError(f"the engine ended a run: {frame['error']}")
            meta = frame["meta_info"]
            run.arrivals += [time.perf_counter()] * (meta["completion_tokens"] - seen)
            seen = meta["completion_tokens"]
            told = str((meta.get("cached_tokens_details") or {}).get("storage_backend") or "")
            if told.startswith("agentkv:"):
                run.facts = json.loads(told.removeprefix("agentkv:"))
    if mode != "full":
        client.post("/close_session", json={"session_id": session}).raise_for_status()
    return run


def turn(work: Workload, session: str, mode: str) -> dict[str, Any]:
    """The engine's description of a run's only turn: a prompt whose middle half came from tools."""
    n = len(work.ids)
    quarter = n // 4
    return {
        "v": 1,
        "session": session,
        "epoch": 0,
        "budget": 2 * (n + work.tokens) if mode == "window" else work.budget,
        "policy": "agentkv",
        "runs": [0, quarter, Label.INPUT, quarter, 3 * quarter, Label.TOOL, 3 * quarter, n, Label.INPUT],
        "decode": {"family": work.family, "initial": "start"},
        "force_window": mode == "window",
    }


def check_held(run: Run, work: Workload, mode: str) -> None:
    """Raises:
    StackError: the run's KV is not what its mode stands for, so its speed would mean nothing.
    """
    held = run.facts.get("held")
    total = len(work.ids) + work.tokens
    allowed = {"full": [None], "window": range(total - 1, total + 1), "budget": range(1, work.budget + 145)}[mode]
    if held not in allowed:
        raise StackError(f"a run as {mode} held {held} KV tokens of {total}")


def results(runs: dict[str, list[Run]], context: int, tokens: int) -> dict[str, Any]:
    """Speeds, the ratios of each pair, gaps between tokens, and a split of a token's time into what does not
    depend on the KV length and attention (from the two runs on the same path)."""
    speed = {mode: [run.tok_s for run in runs[mode]] for mode in MODES}
    ratio = [a / b for a, b in zip(speed["budget"], speed["full"], strict=True)]
    same_path = [a / b for a, b in zip(speed["budget"], speed["window"], strict=True)]
    gaps = {mode: sorted(1000 * gap for run in runs[mode] for gap in run.gaps) for mode in MODES}
    long, short = median(gaps["window"]), median(gaps["budget"])
    held = median(run.facts["held"] for run in runs["budget"])
    slope = (long - short) / (context + tokens / 2 - held)  # milliseconds per KV token
    return {
        "full_tok_s": spread(speed["full"]),
        "window_tok_s": spread(speed["window"]),
        "budget_tok_s": spread(speed["budget"]),
        "ratio": spread(ratio),
        "ratio_same_path": spread(same_path),
        "held_kv_tokens": {"budget": held, "window": median(run.facts["held"] for run in runs["window"])},
        "ms_between_tokens": {
            mode: {"p50": median(sizes), "p99": sizes[int(0.99 * (len(sizes) - 1))], "max": sizes[-1]}
            for mode, sizes in gaps.items()
        },
        "where_a_token_goes_ms": {
            "whatever_the_kv_length": short - slope * held,
            "attention_over_the_window": long - short + slope * held,
            "attention_over_the_budget": slope * held,
            "stock_path_more_than_ours": median(gaps["full"]) - long,
        },
    }


def prompt(vocabulary: Vocabulary, length: int) -> list[int]:
    """Returns `length` token ids of a real agent transcript, repeated where it is too short."""
    recording = load_recording()
    parts = [recording.system, *(call.result for call in recording.calls)]
    ids: list[int] = []
    for part in range(length):
        if len(ids) >= length:
            break
        ids += vocabulary.encode(f"{part}\n{parts[part % len(parts)]}\n")[0].tolist()
    return ids[:length]
