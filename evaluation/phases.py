"""Do the queries of different phases span different subspaces? The analysis of the AgentKV paper (arXiv 2609.14872).

For every span of one phase, and per layer and KV head, the top k right singular vectors of its queries (those of all
query heads of the group) are its subspace. Principal angles between the subspaces of two spans come from the singular
values of V_s^T V_t; their mean is the spans' distance. Phases differ if spans of two phases are further apart than two
spans of one phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentkv_serve.engine.policies import Rope
from agentkv_serve.evaluation.decoder import Attend, Decoder, causal_mask
from agentkv_serve.evaluation.session import Cache
from agentkv_serve.evaluation.trajectory import Trajectory
from agentkv_serve.phase_tagger import Label

SUBSPACE = 5
"""k, dimensions of a span's subspace (the paper's)."""
TOKENS = 16
"""Evenly spaced tokens taken of every span, so that long spans are not better estimated than short ones."""
MOST_SPANS = 16
"""Spans of a label in one trajectory; more are thinned out evenly."""
LABELS = (Label.INPUT, Label.THINK, Label.ACT, Label.TOOL, Label.SAY)
PERMUTATIONS = 1000
PASS = 256
"""Tokens of a forward."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Angles:
    """Distances between the spans of one trajectory."""

    labels: npt.NDArray[np.int8]  # [S] label of each span
    degrees: npt.NDArray[np.float32]  # [L, Hkv, S, S] mean principal angle


def spans_of(labels: npt.NDArray[np.int8]) -> list[tuple[int, int, Label]]:
    """Runs of one label that are long enough, in order: `(start, end, label)`."""
    bounds = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    runs = [(begin, end, Label(int(labels[begin]))) for begin, end in pairwise(bounds) if end - begin >= TOKENS]
    chosen = []
    for label in LABELS:
        own = [run for run in runs if run[2] is label]
        keep = np.linspace(0, len(own) - 1, min(len(own), MOST_SPANS)).round().astype(int)
        chosen += [own[index] for index in keep]
    return sorted(chosen)


@torch.inference_mode()
def queries_at(decoder: Decoder, trajectory: Trajectory, positions: npt.NDArray[np.int64]) -> Tensor:
    """Queries `[L, P, Hq, D]` fp32 after RoPE of the tokens at ascending positions, from an uncompressed run."""
    shape = (decoder.layers, len(positions), decoder.query_heads, decoder.head_dim)
    taken = torch.empty(shape, device=decoder.device)
    ids = torch.from_numpy(trajectory.ids).to(decoder.device)
    cos, sin = decoder.rotation(len(ids))
    cache = Cache(decoder, len(ids))
    for start in range(0, len(ids), PASS):
        end = min(start + PASS, len(ids))
        attend = _attention(decoder, cache, taken, positions, start, end)
        decoder.forward(ids[start:end], 1, (cos[start:end], sin[start:end]), attend)
        cache.held = end
    return taken


def _attention(
    decoder: Decoder, cache: Cache, taken: Tensor, positions: npt.NDArray[np.int64], start: int, end: int
) -> Attend:
    """Attention of the tokens `[start, end)` that also writes the wanted queries to `taken`."""
    here = np.flatnonzero((positions >= start) & (positions < end))
    rows = torch.from_numpy(positions[here] - start)
    mask = causal_mask(end - start, end, decoder.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.put(layer, k[0], v[0])
        taken[layer, here] = q[0][:, rows].transpose(0, 1)
        return scaled_dot_product_attention(q, keys[None], values[None], mask, scale=decoder.scale, enable_gqa=True)

    return attend


def angles(decoder: Decoder, trajectory: Trajectory, rope: Rope) -> tuple[Angles, Angles]:
    """Distances between the trajectory's spans: of the queries after RoPE, and before it."""
    spans = spans_of(trajectory.labels)
    places = np.stack([np.linspace(start, end - 1, TOKENS).round().astype(np.int64) for start, end, _ in spans])
    queries = queries_at(decoder, trajectory, places.ravel())
    positions = torch.from_numpy(places.ravel()).to(decoder.device)
    unrotated = rope.to(decoder.device).unrotate(queries.transpose(1, 2), positions).transpose(1, 2)
    labels = np.array([label for _, _, label in spans], np.int8)
    return Angles(labels, _distances(decoder, queries)), Angles(labels, _distances(decoder, unrotated))


def _distances(decoder: Decoder, queries: Tensor) -> npt.NDArray[np.float32]:
    """Distances `[L, Hkv, S, S]` of S spans, from the queries `[L, S * TOKENS, Hq, D]` of their tokens."""
    group = decoder.query_heads // decoder.kv_heads
    split = queries.reshape(decoder.layers, -1, TOKENS, decoder.kv_heads, group, decoder.head_dim)
    rows = split.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)  # [L, Hkv, S, TOKENS * G, D]
    return principal_angles(torch.linalg.svd(rows, full_matrices=False).Vh[..., :SUBSPACE, :])


def principal_angles(basis: Tensor) -> npt.NDArray[np.float32]:
    """Mean principal angle in degrees `[..., S, S]` of S subspaces, each given by orthonormal rows `[..., S, k, D]`."""
    products = torch.einsum("...ikd,...jld->...ijkl", basis, basis)
    cosines = torch.linalg.svdvals(products).clamp(0, 1)
    result: npt.NDArray[np.float32] = torch.rad2deg(cosines.acos().mean(-1)).cpu().numpy()
    return result


def describe(found: Sequence[Angles]) -> dict[str, Any]:
    """Matrix of mean angles by phase, per-head and per-layer gaps, and a permutation test, over trajectories.

    inter: pairs of spans of two labels; intra: pairs of two spans of one. The test shuffles the spans' labels within
    each trajectory.
    """
    names = [label.name.lower() for label in LABELS]
    matrix = np.full((len(LABELS), len(LABELS)), np.nan)
    for row, first in enumerate(LABELS):
        for column, second in enumerate(LABELS):
            cells = [_between(one, first, second) for one in found]
            values = np.concatenate([cell for cell in cells if cell.size] or [np.empty(0)])
            matrix[row, column] = values.mean() if values.size else np.nan
    parts = [_split(one.degrees, one.labels) for one in found]
    inter, intra = (np.mean([part[side] for part in parts], axis=0) for side in (0, 1))  # [L, Hkv]
    gap = inter - intra
    overall = float(gap.mean())
    generator = np.random.default_rng(0)
    means = [one.degrees.mean(axis=(0, 1)) for one in found]
    shuffled = [
        np.mean([_gap(mean, generator.permutation(one.labels)) for mean, one in zip(means, found, strict=True)])
        for _ in range(PERMUTATIONS)
    ]
    return {
        "trajectories": len(found),
        "spans": {
            name: int(sum((one.labels == label).sum() for one in found))
            for name, label in zip(names, LABELS, strict=True)
        },
        "labels": names,
        "matrix": [[None if np.isnan(cell) else round(float(cell), 2) for cell in row] for row in matrix],
        "inter": round(float(inter.mean()), 3),
        "intra": round(float(intra.mean()), 3),
        "gap": round(overall, 3),
        "heads_with_gap": round(float((gap > 0).mean()), 4),
        "gap_by_head": [[round(float(value), 2) for value in row] for row in gap],
        "gap_by_layer": [round(float(value), 2) for value in gap.mean(1)],
        "p_value": round((1 + sum(value >= overall for value in shuffled)) / (1 + PERMUTATIONS), 4),
        "gap_of_shuffled_labels_97_5": round(float(np.percentile(shuffled, 97.5)), 3),
    }


def distributions(found: Sequence[Angles]) -> tuple[Floats, Floats]:
    """All inter-phase and all intra-phase angles, every head and pair of spans."""
    inter, intra = [], []
    for one in found:
        upper = np.triu(np.ones(len(one.labels), bool)[:, None] & np.ones(len(one.labels), bool), 1)
        same = one.labels[:, None] == one.labels
        inter.append(one.degrees[..., upper & ~same].ravel())
        intra.append(one.degrees[..., upper & same].ravel())
    return np.concatenate(inter).astype(float), np.concatenate(intra).astype(float)


def _between(one: Angles, first: Label, second: Label) -> Floats:
    pairs = (one.labels[:, None] == first) & (one.labels == second) & ~np.eye(len(one.labels), dtype=bool)
    values: Floats = one.degrees[..., pairs].ravel().astype(float)
    return values


def _split(degrees: npt.NDArray[Any], labels: npt.NDArray[np.int8]) -> tuple[Any, Any]:
    """Mean inter-phase and intra-phase angles over pairs of spans: `[...]` each."""
    other = ~np.eye(len(labels), dtype=bool)
    same = labels[:, None] == labels
    return degrees[..., other & ~same].mean(-1), degrees[..., other & same].mean(-1)


def _gap(degrees: npt.NDArray[Any], labels: npt.NDArray[np.int8]) -> float:
    inter, intra = _split(degrees, labels)
    return float(inter - intra)
