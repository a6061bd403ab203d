"""Each policy against its formula, written a second time in numpy, on a session whose heads hold different tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentkv_serve.engine.policies import get_policy, policy_names
from agentkv_serve.engine.policies.base import LEAST_RECENT
from agentkv_serve.engine.policies.statistics import Statistics
from agentkv_serve.phase_tagger import Label

from .windows import (
    DIM,
    GROUP,
    KV_HEADS,
    LABELS,
    LAYERS,
    LENGTH,
    QUERY_HEADS,
    ROPE,
    SCALE,
    Session,
    causal,
    session,
    softmax,
    union_mass,
)

HEADS = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]


def statistics(seed: int = 5) -> Statistics:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(LAYERS, QUERY_HEADS, DIM // 2, dtype=torch.complex64, generator=generator)
    return Statistics(mean, mean.abs() + torch.rand(mean.shape, generator=generator))


def every_policy() -> list[str]:
    return [name for name in policy_names() if name != "full"]


def make(name: str) -> Session:
    return session(get_policy(name))


def close(actual: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("name", every_policy())
def test_what_is_protected_stays_and_the_rest_goes_by_score(name: str) -> None:
    settings = {"statistics": statistics()} if name == "triattention" else {}
    policy = get_policy(name, **settings)
    keep = max(100, policy.least_budget)
    made = session(policy, count=200, since=200, keep=keep)
    choice = policy.choose(made.window)
    assert choice.kept.shape == (LAYERS, KV_HEADS, keep)
    assert (choice.carry is not None) == (policy.carry_dtype is not None)
    scores = policy.score(made.window).keep
    protected = policy.protection(made.window).expand(LAYERS, KV_HEADS, 200)
    assert scores.dtype == torch.float32 and scores.isfinite().all()
    for layer, head in HEADS:
        kept = set(choice.kept[layer, head].tolist())
        assert len(kept) == keep
        assert set(protected[layer, head].nonzero()[:, 0].tolist()) <= kept
        assert set(range(200 - LEAST_RECENT, 200)) <= kept and set(range(policy.sinks)) <= kept
        free = [i for i in range(200) if not protected[layer, head, i]]
        inside = [float(scores[layer, head, i]) for i in free if i in kept]
        outside = [float(scores[layer, head, i]) for i in free if i not in kept]
        assert not inside or min(inside) >= max(outside)


@pytest.mark.parametrize("name", ["agentkv", "agentkv_paper", "recent"])
def test_agentkv(name: str) -> None:
    made = make(name)
    entries = [entry for entry, position in enumerate(made.where) if position >= 0]
    scores = get_policy(name).score(made.window).keep
    for layer, head in HEADS:
        close(scores[layer, head], union_mass(made, layer, head, entries, 150, 7))


def test_the_paper_s_markers_are_sticky_and_ours_end() -> None:
    ours = get_policy("agentkv").ring_table()
    paper = get_policy("agentkv_paper").ring_table()
    assert ours[Label.SAY] == ours[Label.GLUE] == 0 and paper[Label.SAY] == paper[Label.GLUE] == -1
    assert ours[:4] == paper[:4]


def test_recent_holds_the_newest_32() -> None:
    assert sorted(make("recent").where) == list(range(LENGTH - 32, LENGTH))


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_value_norm_weight(power: float) -> None:
    made = make("agentkv")
    plain, weighed = (get_policy("agentkv", value_power=p).score(made.window).keep for p in (0.0, power))
    close(weighed, plain.numpy() * np.linalg.norm(made.values, axis=-1) ** power)


@pytest.mark.parametrize("name", ["agentkv", "agentkv_plus"])
def test_a_negative_power_is_refused_at_start(name: str) -> None:
    with pytest.raises(ValueError, match="value_power must not be negative, got -1"):
        get_policy(name, value_power=-1)


def test_rkv() -> None:
    made = make("rkv")
    scores = get_policy("rkv").score(made.window).keep
    for layer, head in HEADS:
        unit = made.keys[layer, head] / np.linalg.norm(made.keys[layer, head], axis=-1, keepdims=True)
        similar = unit @ unit.T
        np.fill_diagonal(similar, 0.0)
        for row in range(150):
            above = np.flatnonzero(similar[row] > 0.5)
            similar[row, above[-1] if len(above) else 0] = 0.0
        repeats = softmax(similar.mean(0))[:142]
        mass = union_mass(made, layer, head, list(range(8)), 142, 7)
        close(scores[layer, head, :142], 0.07 * mass - 0.93 * repeats)


def test_snapkv() -> None:
    made = make("snapkv")
    scores = get_policy("snapkv").score(made.window).keep
    for layer, head in HEADS:
        mean = np.mean([causal(made, layer, head, entry) for entry in range(64)], axis=0)[:86]
        padded = np.pad(mean, 2)
        close(scores[layer, head, :86], np.array([padded[i : i + 5].mean() for i in range(86)]))


def test_streamingllm_keeps_four_sinks_and_the_newest() -> None:
    kept = get_policy("streamingllm").choose(make("streamingllm").window).kept
    assert (kept == torch.tensor([*range(4), *range(150 - 96, 150)])).all()


def test_h2o_sums_each_query_once() -> None:
    policy = get_policy("h2o")
    made = make("h2o")
    carry = torch.rand(LAYERS, KV_HEADS, 150)
    scored = policy.score(replace(made.window, carry=carry))
    fresh = [entry for entry, position in enumerate(made.where) if position >= made.window.since]
    assert len(fresh) == LENGTH - made.window.since < 128
    for layer, head in HEADS:
        total = sum(causal(made, layer, head, entry) for entry in fresh) + carry[layer, head].numpy()
        close(scored.keep[layer, head], total)
    choice = policy.choose(replace(made.window, carry=carry))
    assert choice.carry is not None
    close(choice.carry, scored.keep.gather(-1, choice.kept).numpy())
    assert (choice.kept[..., -50:] == torch.arange(100, 150)).all()  # half of the budget is the newest


def test_expected_attention() -> None:
    policy = get_policy("expected_attention")
    made = make("expected_attention")
    scores = policy.score(made.window).keep
    frequencies = ROPE.frequencies.double().numpy()
    ahead = np.arange(LENGTH, LENGTH + 512)[:, None] * frequencies
    turn = np.exp(1j * ahead).mean(0)
    for layer, head in HEADS:
        mass = []
        for member in range(GROUP):
            rows = made.queries[layer, made.where >= 0, head * GROUP + member]
            pairs = rows[:, : DIM // 2] + 1j * rows[:, DIM // 2 :]
            pairs = pairs * np.exp(-1j * made.where[made.where >= 0][:, None] * frequencies)
            plain = np.concatenate([pairs.real, pairs.imag], -1)
            mean, centred = plain.mean(0), plain - plain.mean(0)
            rotation = np.block([[np.diag(turn.real), -np.diag(turn.imag)], [np.diag(turn.imag), np.diag(turn.real)]])
            mean, spread = rotation @ mean, rotation @ (centred.T @ centred / len(plain)) @ rotation.T
            keys = made.keys[layer, head]
            mass.append(softmax(keys @ mean * SCALE + np.einsum("nd,de,ne->n", keys, spread, keys) * SCALE**2 / 2))
        expected = np.mean(mass, axis=0) * np.linalg.norm(made.values[layer, head], axis=-1)
        close(scores[layer, head], expected)


def test_expected_attention_of_neighbouring_pairs_is_that_of_the_same_model_in_halves() -> None:
    policy = get_policy("expected_attention")
    made = make("expected_attention")
    order = torch.arange(DIM).view(2, -1).t().flatten()  # pairs (f, f + F) to (2f, 2f + 1)
    turned = replace(
        made.window,
        k_buffers=[buffer[..., order] for buffer in made.window.k_buffers],
        queries=made.window.queries[..., order],
        rope=replace(ROPE, interleaved=True),
    )
    torch.testing.assert_close(policy.score(turned).keep, policy.score(made.window).keep, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["per_layer_head", "per_head"])
def test_triattention(mode: str) -> None:
    stats = statistics()
    policy = get_policy("triattention", statistics=stats, pruning_mode=mode)
    made = session(policy)
    if mode == "per_head":  # as it is when no other policy came before: all layers hold the same tokens
        made.positions[1] = made.positions[0]
        made = made.with_(positions=torch.from_numpy(made.positions))
    scores = policy.score(made.window).keep
    frequencies = ROPE.frequencies.double().numpy()
    offsets = 2.0 ** np.arange(17)
    expected = np.empty((LAYERS, KV_HEADS, 150))
    for layer, head in HEADS:
        rows = []
        for member in range(GROUP):
            mean = stats.mean[layer, head * GROUP + member].numpy().astype(np.complex128)
            extra = stats.magnitude[layer, head * GROUP + member].double().numpy() - np.abs(mean)
            keys, where = made.keys[layer, head], made.positions[layer, head][:, None]
            pairs = (keys[:, : DIM // 2] + 1j * keys[:, DIM // 2 :]) * np.exp(-1j * where * frequencies)
            angle = np.angle(mean * pairs.conj())
            total = np.zeros(150)
            for offset in offsets:
                turned = np.cos(frequencies * (LENGTH - where + offset) + angle)
                total += (np.abs(mean) * np.abs(pairs) * turned).sum(-1)
            row = total / len(offsets) + (extra * np.abs(pairs)).sum(-1)
            rows.append((row - row.mean()) / row.std(ddof=1))
        expected[layer, head] = np.max(rows, axis=0)
    if mode == "per_head":
        expected[:] = expected.mean(0)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-3, atol=1e-4)


def test_triattention_without_statistics_says_what_to_do() -> None:
    policy = get_policy("triattention")
    with pytest.raises(ValueError, match="agentkv calibrate"):
        policy.score(session(policy).window)


def test_random_is_the_same_for_a_seed_and_keeps_the_prompt() -> None:
    policy = get_policy("random")
    first, again, other = (policy.choose(session(policy, seed=seed).window).kept for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    made = session(policy, count=200, since=200, keep=160)
    kept = policy.choose(made.window).kept
    assert made.window.prompt() == 43
    assert (kept[..., :43] == torch.arange(43)).all() and (kept[..., -64:] == torch.arange(136, 200)).all()
    assert not torch.equal(kept[0, 0], kept[0, 1])
    tight = policy.choose(session(policy, count=200, since=200).window).kept
    assert (tight[..., :18] == torch.arange(18)).all() and not (tight[..., 18] == 18).all()


@pytest.mark.parametrize("rounds", ["new action", "no new action"])
def test_actkv(rounds: str) -> None:
    policy = get_policy("actkv")
    made = session(policy, since=180 if rounds == "new action" else LENGTH - 30)
    acts = {int(position) for position in np.flatnonzero(LABELS == Label.ACT)}
    entries = [entry for entry, position in enumerate(made.where) if position in acts]
    fresh = [entry for entry in entries if made.where[entry] >= made.window.since]
    assert len(entries) == 27 and bool(fresh) == (rounds == "new action")
    carry = torch.rand(LAYERS, KV_HEADS, 150) * 0.1
    scored = policy.score(replace(made.window, carry=carry))
    assert scored.carry is not None
    for layer, head in HEADS:
        noted = carry[layer, head].double().numpy()
        if fresh:
            mean = np.mean([causal(made, layer, head, entry) for entry in fresh], axis=0)
            hits, mass = np.zeros(150), 0.0
            for entry in np.argsort(-mean, kind="stable"):
                if mass >= 0.9 * mean.sum():
                    break
                hits[entry] = mean[entry]
                mass += mean[entry]
            noted = noted * 2**-0.5 + hits
        close(scored.carry[layer, head], noted)
        rest = np.mean([causal(made, layer, head, entry) for entry in entries], axis=0)
        close(scored.keep[layer, head], noted + 1e-6 * rest)


def test_actkv_before_the_first_action_goes_by_the_newest_tokens() -> None:
    policy = get_policy("actkv")
    made = session(policy)
    acts = torch.from_numpy(LABELS == Label.ACT)
    none = torch.where(acts[made.window.query_positions], -1, made.window.query_positions)
    made = made.with_(query_positions=none, valid=none >= 0)
    newest = [entry for entry in range(8) if made.where[entry] >= 0]
    scores = policy.score(made.window).keep
    for layer, head in HEADS:
        close(scores[layer, head] * 1e6, np.mean([causal(made, layer, head, entry) for entry in newest], axis=0))


def test_full_keeps_everything_and_unknown_names_are_refused() -> None:
    assert not get_policy("full").compresses and policy_names()[0] == "full"
    with pytest.raises(TypeError, match="never asked"):
        get_policy("full").score(session(get_policy("agentkv")).window)
    with pytest.raises(KeyError, match="known: full, agentkv"):
        get_policy("bogus")
