"""`agentkv eval quality`: the policies against full KV on recorded agent runs, resumable trajectory by trajectory."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentkv_serve.engine import calibrate
from agentkv_serve.engine.policies import Rope, get_policy
from agentkv_serve.engine.policies.statistics import Statistics
from agentkv_serve.evaluation.arms import Budget, Entrant, arms_of, fingerprint
from agentkv_serve.evaluation.decoder import Decoder
from agentkv_serve.evaluation.meter import Meter, long_copies
from agentkv_serve.evaluation.replay import first_compaction, replay
from agentkv_serve.evaluation.scores import score_arm
from agentkv_serve.evaluation.session import Arm, Session
from agentkv_serve.evaluation.trajectory import Half, Recording, Trajectory, read_recordings, tokenise
from agentkv_serve.evaluation.variants import noisy
from agentkv_serve.model import cache_dir
from agentkv_serve.phase_tagger import ChatFormat

CALIBRATION = 6144
"""Tokens that query statistics are collected from where no file was given."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a quality run is made of. Two runs with equal settings give equal numbers.

    Trajectories are cut to `length` tokens, those shorter than `least` are left out: a share of them is a budget that
    the published windows alone would fill. chunk, every: as in `replay`.
    measured_from: all arms count from where this budget is first exceeded, those with a budget above the trajectory's
    length too, which lose nothing (default: each from its own, and there are none of those).
    """

    model: Path
    traces: tuple[Path, ...]
    entrants: tuple[Entrant, ...]
    budgets: tuple[Budget, ...]
    split: Half | None = None
    length: int = 3072
    least: int = 2048
    limit: int | None = None
    measured_from: Budget | None = None
    chunk: int = 128
    every: int = 128
    say_phase: str = "others"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def protocol(self) -> dict[str, object]:
        """The part that the numbers of every arm depend on."""
        own = {"measured_from": self.measured_from.text} if self.measured_from else {}
        return {
            **own,
            "model": self.model.name,
            "length": self.length,
            "chunk": self.chunk,
            "every": self.every,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def arms(self, length: int) -> list[Arm]:
        """The arms of a trajectory of so many tokens."""
        return arms_of(self.entrants, self.budgets, length, self.say_phase, whole=self.measured_from is not None)

    def chosen(self, chat: ChatFormat) -> Iterable[tuple[Recording, Trajectory]]:
        """The recordings that are evaluated, in order."""
        taken = 0
        for recording in read_recordings(self.traces, self.split):
            if self.limit is not None and taken >= self.limit:
                return
            trajectory = tokenise(chat, recording, self.length)
            if trajectory is not None and len(trajectory.ids) >= self.least:
                taken += 1
                yield recording, trajectory


def run(settings: Settings, folder: Path) -> list[dict[str, Any]]:
    """Evaluates what is not yet in `folder` (one JSON per trajectory, written as it is done) and returns all of it.

    An arm whose recorded hash equals that of today's settings is not computed again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    code = commit()  # of what is loaded: the repository may move on during a long run
    chat = ChatFormat.from_folder(settings.model)
    chosen = list(settings.chosen(chat))
    decoder: Decoder | None = None
    rope: Rope | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        whole = progress.add_task("trajectories", total=len(chosen))
        tokens = progress.add_task("tokens")
        for recording, trajectory in chosen:
            file = folder / f"{recording.name.replace('/', '.')}.json"
            record: dict[str, Any] = _read(file) or _describe(recording, trajectory)
            arms = settings.arms(len(trajectory.ids))
            due = [arm for arm in arms if _due(record, arm, settings)]
            if due:
                if decoder is None:
                    decoder = Decoder.load(settings.model, settings.dtype, settings.device)
                    rope = _rope(settings.model)
                progress.update(tokens, description=recording.name, total=len(trajectory.ids), completed=0)
                began = time.perf_counter()
                scored = evaluate(
                    decoder, trajectory, due, rope, settings, lambda done: progress.update(tokens, completed=done)
                )
                stamp = {"commit": code, "seconds": round(time.perf_counter() - began, 1)}
                for arm in due:
                    hashed = fingerprint(arm, settings.protocol())
                    record["arms"][arm.name] = {"hash": hashed, **stamp, "scores": scored[arm.name]}
                _write(file, record)
            progress.advance(whole)
    files = [folder / f"{recording.name.replace('/', '.')}.json" for recording, _ in chosen]
    return [found for file in files if (found := _read(file))]


def evaluate(
    decoder: Decoder,
    trajectory: Trajectory,
    arms: Sequence[Arm],
    rope: Rope | None,
    settings: Settings,
    advance: Any = lambda done: None,
) -> dict[str, dict[str, Any] | None]:
    """Numbers of every arm on one trajectory, in one replay; None for an arm whose budget was never exceeded."""
    sessions = [Session(decoder, arm, noisy(trajectory.labels, arm.noise), trajectory.name, rope) for arm in arms]
    meter = Meter(decoder, trajectory, sessions)
    for step in replay(decoder, trajectory, sessions, chunk=settings.chunk, every=settings.every, watch=meter.watch):
        meter.take(step)
        advance(step.end)
    copies = long_copies(trajectory)
    scored = {}
    for session, track in zip(sessions, meter.tracks, strict=True):
        # The same tokens for every policy, whether it compresses prefills or not, and whoever else takes part.
        budget = settings.measured_from.of(len(trajectory.ids)) if settings.measured_from else session.arm.budget
        start = first_compaction(trajectory, budget, chunk=settings.chunk, every=settings.every)
        scored[session.arm.name] = score_arm(trajectory, meter, track, session, start, copies)
    return scored


def with_policies(
    settings: Settings, wanted: Sequence[tuple[str, str, dict[str, Any]]], statistics: Path | None
) -> Settings:
    """The settings with their policies made: (shown name, policy, its settings) each.

    A policy that needs query statistics gets those of `statistics`; without a file they are collected from the
    development half of the same traces, once per model and traces (kept in the cache folder).
    """
    entrants = []
    for shown, name, options in wanted:
        policy = get_policy(name, **options)
        if policy.needs_statistics:
            policy = get_policy(name, **options, statistics=_statistics(settings, statistics))
        entrants.append(Entrant(shown, policy))
    return replace(settings, entrants=tuple(entrants))


@cache
def _statistics(settings: Settings, file: Path | None) -> Statistics:
    if file is not None:
        return Statistics.load(file)
    from transformers import AutoModelForCausalLM

    chat = ChatFormat.from_folder(settings.model)
    ids: list[int] = []
    for recording in read_recordings(settings.traces, "development"):
        if len(ids) >= CALIBRATION:
            break
        trajectory = tokenise(chat, recording, settings.length)
        ids += trajectory.ids.tolist() if trajectory else []
    ids = ids[:CALIBRATION]
    name = hashlib.sha256(repr((settings.model.name, ids)).encode()).hexdigest()[:16]
    file = cache_dir() / "statistics" / f"{name}.pt"
    if not file.is_file():
        model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=torch.float32, attn_implementation=calibrate.attention_name()
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        calibrate.collect(model.eval(), ids, _rope(settings.model)).save(file, {"tokens": len(ids)})
    return Statistics.load(file)


def commit() -> str:
    """The repository's commit, with `+` where the code differs from it; `unknown` outside a repository."""
    here = Path(__file__).resolve().parent.parent
    parts = ("engine", "kernels", "evaluation", "phase_tagger")
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True)
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *parts], cwd=here, capture_output=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.returncode else "") if head.returncode == 0 else "unknown"


def _rope(model: Path) -> Rope:
    from transformers import AutoConfig

    return Rope.from_config(AutoConfig.from_pretrained(model))


def _describe(recording: Recording, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "name": recording.name,
        "task": recording.task,
        "source": recording.source,
        "half": recording.half,
        "tokens": len(trajectory.ids),
        "generated": int(trajectory.generated.sum()),
        "arms": {},
    }


def _due(record: dict[str, Any], arm: Arm, settings: Settings) -> bool:
    known = record["arms"].get(arm.name)
    return known is None or bool(known["hash"] != fingerprint(arm, settings.protocol()))


def _read(file: Path) -> dict[str, Any] | None:
    return dict(json.loads(file.read_text())) if file.is_file() else None


def _write(file: Path, record: dict[str, Any]) -> None:
    """One line per arm; appears whole or not at all."""
    head = json.dumps({key: value for key, value in record.items() if key != "arms"})[:-1]
    arms = ",\n".join(f" {json.dumps(name)}: {json.dumps(arm)}" for name, arm in record["arms"].items())
    fresh = file.with_suffix(".tmp")
    fresh.write_text(f'{head}, "arms": {{\n{arms}\n}}}}\n')
    os.replace(fresh, file)
