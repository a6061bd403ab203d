"""A benchmark made ready to run: a preset with the user's changes, its model, sessions, rows and pool."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer

from agentkv_serve.bench.serve.client import Setting
from agentkv_serve.bench.serve.presets import PRESETS, Preset
from agentkv_serve.bench.serve.shapes import write_shape
from agentkv_serve.bench.serve.workload import Turn, full_length
from agentkv_serve.model import check_model
from agentkv_serve.parsers import chat_template
from agentkv_serve.phase_tagger import Vocabulary, detect_family


@dataclass(frozen=True)
class Job:
    """A preset made ready: the model, its sessions, the rows, the servers' pool in tokens and their other flags."""

    preset: Preset
    model: Path
    family: str
    plan: list[list[Turn]]
    settings: list[Setting]
    pool: int | None
    flags: tuple[str, ...] = ()


def named(name: str) -> Preset:
    """The preset of that name.

    Raises:
        typer.BadParameter: none is.
    """
    if name not in PRESETS:
        raise typer.BadParameter(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def changed(preset: Preset, work: dict[str, Any], own: dict[str, Any]) -> Preset:
    """The preset with the given values that are not None; `changed` names those that differ."""
    given = {name: value for name, value in work.items() if value is not None}
    mine = {name: value for name, value in own.items() if value is not None}
    before = {**asdict(preset.work), **asdict(preset)}
    differs = {name: value for name, value in {**given, **mine}.items() if before[name] != value}
    differs |= {"trace": str(differs["trace"])} if "trace" in differs else {}
    return replace(preset, **mine, work=replace(preset.work, **given), changed=differs)


def ready(preset: Preset, folder: Path, pool: int | None, scratch: Path, flags: tuple[str, ...] = ()) -> Job:
    """Makes the model folder, the sessions and the pool of a preset.

    Args:
        flags: of the user, for both servers.

    Raises:
        ModelError: the model cannot be served.
        typer.BadParameter: a session is longer than the model's context, or a policy is unknown.
    """
    from agentkv_serve.engine.policies import policy_names

    if unknown := set(preset.policies) - set(policy_names()):
        raise typer.BadParameter(f"unknown policies {', '.join(sorted(unknown))}; known: {', '.join(policy_names())}")
    vocabulary = Vocabulary(folder)
    plan = preset.work.plan(vocabulary)
    lengths = [full_length(session) for session in plan]
    if preset.shape == "given":
        context = check_model(folder).context
        if max(lengths) >= context:
            raise typer.BadParameter(f"a session of {max(lengths)} tokens does not fit into {context} of context")
    else:
        folder = write_shape(preset.shape, folder, scratch)
    if pool is None and preset.pool_share is not None:
        pool = int(preset.pool_share * sum(lengths))
        # A pool for all also holds what SGLang sets aside for each running request.
        pool += 1024 if preset.pool_share >= 1 else 0
    fitting = preset.work.sessions if pool is None else max(1, pool // max(lengths))
    family = detect_family(vocabulary, chat_template(folder)).name
    flags += ("--dtype", preset.dtype) + (() if preset.shape == "given" else ("--load-format", "dummy"))
    return Job(preset, folder, family, plan, preset.settings(fitting), pool, flags)


def configuration(job: Job) -> dict[str, Any]:
    """All that a preset's figures depend on, but the machine."""
    preset = job.preset
    return {
        **asdict(preset.work),
        "trace": str(preset.work.trace) if preset.work.trace else None,
        "full_length_max": max(full_length(session) for session in job.plan),
        "full_length_sum": sum(full_length(session) for session in job.plan),
        "pool_tokens": job.pool,
        "chunk": preset.chunk,
        "repeats": preset.repeats,
        "model": job.model.name,
        "weights": "random" if preset.shape != "given" else "the model's",
        "engine_flags": list(job.flags),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "changed_from_the_preset": preset.changed,
    }


def run_configuration(job: Job) -> dict[str, Any]:
    """What one run's figures depend on: all but how often it is repeated, so that more can be asked for later."""
    found = configuration(job)
    return {name: value for name, value in found.items() if name not in ("repeats", "changed_from_the_preset")}
