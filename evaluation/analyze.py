"""`agentkv analyze`: what a model's queries look like on recorded agent runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import typer
from rich.console import Console

from agentkv_serve.evaluation.cli import Device, Dtype, Least, Length, Limit, Model, More, Out, Split, Traces

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """What a model's queries look like."""


@app.command()
def phases(
    traces: Traces,
    json_out: Out,
    more: More = None,
    model: Model = None,
    split: Split = None,
    limit: Limit = 6,
    length: Length = 3072,
    least: Least = 2048,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Principal angles between the query subspaces of phases, against those between spans of one phase."""
    import torch
    from transformers import AutoConfig

    from agentkv_serve.engine.policies import Rope
    from agentkv_serve.evaluation.decoder import Decoder
    from agentkv_serve.evaluation.phase_plots import draw
    from agentkv_serve.evaluation.phases import angles, describe, distributions, queries_at, spans_of
    from agentkv_serve.evaluation.quality import Settings, commit
    from agentkv_serve.model import default_model
    from agentkv_serve.phase_tagger import ChatFormat, TemplateError

    folder = (model or default_model()).expanduser().resolve()
    settings = Settings(folder, (*traces, *(more or [])), (), (), split, length, least, limit)
    console = Console(stderr=True)
    try:
        chosen = [trajectory for _, trajectory in settings.chosen(ChatFormat.from_folder(folder))]
        decoder = Decoder.load(folder, getattr(torch, dtype), device)
    except (ValueError, TemplateError) as error:
        console.print(f"agentkv analyze phases: {error}", markup=False)
        raise typer.Exit(1) from error
    if not chosen:
        console.print("agentkv analyze phases: no trajectory is long enough")
        raise typer.Exit(1)
    rope = Rope.from_config(AutoConfig.from_pretrained(folder))
    pairs = []
    for trajectory in chosen:
        console.print(f"{trajectory.name}: {len(spans_of(trajectory.labels))} spans")
        pairs.append(angles(decoder, trajectory, rope))
    found, unrotated = ([pair[side] for pair in pairs] for side in (0, 1))
    after, before = describe(found), describe(unrotated)
    result: dict[str, Any] = {
        "model": folder.name,
        "commit": commit(),
        "trajectories": [trajectory.name for trajectory in chosen],
        "after_rope": after,
        "before_rope": before,
        "conclusion": conclusion(folder.name, after, before),
    }
    json_out.parent.mkdir(parents=True, exist_ok=True)
    json_out.write_text(json.dumps(result, indent=1) + "\n")
    layer, head = np.unravel_index(np.argmax(after["gap_by_head"]), np.shape(after["gap_by_head"]))
    positions = np.flatnonzero(np.isin(chosen[0].labels, [0, 1, 2, 3, 4]))[:: max(1, len(chosen[0].ids) // 1500)]
    queries = queries_at(decoder, chosen[0], positions)[layer]
    group = decoder.query_heads // decoder.kv_heads
    points = queries[:, head * group : (head + 1) * group].mean(1).cpu().numpy()
    draw(
        result, distributions(found), (points, chosen[0].labels[positions]), (layer, head), json_out.with_suffix(".png")
    )
    json_out.with_suffix(".md").write_text(
        f"# Query subspaces by phase: {folder.name}\n\n{result['conclusion']}\n\n![angles]({json_out.stem}.png)\n"
    )
    typer.echo(result["conclusion"])


def conclusion(model: str, after: dict[str, Any], before: dict[str, Any]) -> str:
    """What the numbers say, in words."""

    def sentence(kind: str, part: dict[str, Any]) -> str:
        verdict = "differ" if part["gap"] > 0 and part["p_value"] < 0.01 else "do not differ"
        return (
            f"Of the queries {kind} RoPE, spans of two phases lie {part['inter']:.1f} degrees apart, two spans of one "
            f"phase {part['intra']:.1f}: a gap of {part['gap']:+.1f}, positive in {part['heads_with_gap']:.0%} of the "
            f"(layer, KV head) pairs; shuffled labels reach {part['gap_of_shuffled_labels_97_5']:+.1f} at most "
            f"(97.5%), p = {part['p_value']:.3f}. Phases {verdict} more than repeats of one phase."
        )

    counts = ", ".join(f"{count} {name}" for name, count in after["spans"].items() if count)
    return (
        f"{model}, {after['trajectories']} trajectories, spans of at least 16 tokens: {counts}. "
        f"{sentence('after', after)} {sentence('before', before)}"
    )
