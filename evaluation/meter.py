"""What a replay is measured by, token by token; every quantity compares an arm with the uncompressed row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentkv_serve.evaluation.decoder import Decoder
from agentkv_serve.evaluation.replay import Step
from agentkv_serve.evaluation.session import Session
from agentkv_serve.evaluation.trajectory import Trajectory
from agentkv_serve.phase_tagger import DEFAULT_FOLD, Label

Floats = npt.NDArray[np.float32]
SHARP = 0.1
"""A head looks sharply at its strongest history key when that key's probability is above this."""
FAR = 256
"""A copy is long-range when its source lies further back than this many tokens."""


@dataclass
class Track:
    """Per token of a trajectory, `[n]`; NaN where nothing was predicted. Index = the token that is predicted."""

    kl: Floats  # KL(uncompressed || arm) of the distribution that predicts the token, in nats
    nll: Floats  # negative log-likelihood of the token
    top: npt.NDArray[np.int64]  # most likely token
    held: Floats  # KV tokens per layer and head that the prediction was made from
    misses: Floats  # share of (layer, query head) pairs whose sharp key is gone; index = the token that asks
    lost: npt.NDArray[np.float64]  # [labels of queries, phases of keys] attention mass on evicted keys
    mass: npt.NDArray[np.float64]  # the same on all keys


class Meter:
    """Follows one replay. `reference` is the uncompressed row's track, `tracks` those of the sessions."""

    def __init__(self, decoder: Decoder, trajectory: Trajectory, sessions: Sequence[Session]) -> None:
        self._decoder = decoder
        self._trajectory = trajectory
        self._sessions = sessions
        self._phases = torch.tensor([DEFAULT_FOLD[Label(label)] for label in trajectory.labels.tolist()])
        self.reference = _track(len(trajectory.ids))
        self.tracks = [_track(len(trajectory.ids)) for _ in sessions]
        self._top: list[tuple[Tensor, Tensor]] = []  # per layer: probability and index of the strongest history key
        self._mass: list[Tensor] = []  # per layer: attention mass [labels, Hkv, history]

    def watch(self, layer: int, queries: Tensor, keys: Tensor) -> None:
        """Notes the uncompressed row's attention of one layer. queries: `[Hq, T, D]`; keys: `[Hkv, S, D]`."""
        if not layer:
            self._top, self._mass = [], []
        hq, count, dim = queries.shape
        hkv, held, _ = keys.shape
        history = held - count
        scores = torch.bmm(queries.reshape(hkv, -1, dim).float(), keys.float().transpose(1, 2))
        scores = scores.view(hkv, hq // hkv, count, held).mul_(self._decoder.scale)
        scores[..., history:].masked_fill_(
            torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1), -torch.inf
        )
        past = scores.softmax(-1)[..., :history]
        self._top.append(tuple(past.max(-1)))  # type: ignore[arg-type]
        by_token = past.sum(1)  # [Hkv, T, history]
        labels = torch.from_numpy(self._trajectory.labels[history:held])
        self._mass.append(torch.stack([by_token[:, labels == label].sum(1) for label in Label]))

    def take(self, step: Step) -> None:
        """Measures one step."""
        self._predictions(step)
        if step.generated:
            self._attention(step)

    def _predictions(self, step: Step) -> None:
        targets = np.arange(step.start + 1, min(step.end + 1, len(self._trajectory.ids)))
        targets = targets[self._trajectory.generated[targets]]
        if not len(targets):
            return
        asked = torch.from_numpy(targets - 1 - step.start)
        truth = torch.from_numpy(self._trajectory.ids[targets]).to(step.hidden.device)
        full = self._decoder.logits(step.hidden[0, asked]).log_softmax(-1)
        probabilities = full.exp()
        entropy = (probabilities * full).sum(-1)
        rows: dict[int, tuple[Tensor, Tensor, Tensor]] = {
            0: (torch.zeros_like(entropy), _nll(full, truth), full.argmax(-1))
        }
        for row in sorted(set(step.rows) - {0}):
            logits = self._decoder.logits(step.hidden[row, asked])
            normaliser = logits.logsumexp(-1)
            kl = entropy - (probabilities * logits).sum(-1) + normaliser
            rows[row] = (kl, _nll(logits, truth) + normaliser, logits.argmax(-1))
        tracks = [(self.reference, 0, step.start), *zip(self.tracks, step.rows, self._held(step), strict=True)]
        for track, row, held in tracks:
            kl, nll, top = rows[row]
            track.kl[targets], track.nll[targets], track.top[targets] = kl.cpu(), nll.cpu(), top.cpu()
            track.held[targets] = held + (targets - step.start)

    def _held(self, step: Step) -> list[int]:
        """KV tokens of each session before the step's own tokens."""
        return [session.held(step.end) - (step.end - step.start) for session in self._sessions]

    def _attention(self, step: Step) -> None:
        strength = torch.stack([value for value, _ in self._top])  # [L, Hkv, G, T]
        index = torch.stack([index for _, index in self._top])
        mass = torch.stack(self._mass, dim=1)  # [labels, L, Hkv, history]
        layers, hkv, group, count = strength.shape
        sharp = strength > SHARP
        phases = self._phases[: step.start].to(mass.device)
        total = _by_phase(mass, phases)
        tokens = slice(step.start, step.end)
        for session, track in zip(self._sessions, self.tracks, strict=True):
            track.mass += total
            track.misses[tokens] = 0.0
            if session.kept is None:
                continue
            kept = torch.ones(layers, hkv, step.start, dtype=torch.bool, device=mass.device)
            kept[..., : session.since] = session.kept
            found = kept.gather(2, index.view(layers, hkv, -1)).view(layers, hkv, group, count)
            track.misses[tokens] = (sharp & ~found).float().mean(dim=(0, 1, 2)).cpu()
            track.lost += _by_phase(mass.masked_fill(kept, 0.0), phases)


def long_copies(trajectory: Trajectory) -> npt.NDArray[np.bool_]:
    """[n] act tokens that end a 3-gram last seen more than 256 tokens ago, once in a user message or a tool result."""
    ids, n = trajectory.ids.tolist(), len(trajectory.ids)
    copies = np.zeros(n, dtype=bool)
    last: dict[tuple[int, ...], int] = {}
    evidence: set[tuple[int, ...]] = set()
    for position in range(2, n):
        gram = tuple(ids[position - 2 : position + 1])
        if trajectory.labels[position] == Label.ACT and gram in evidence:
            copies[position] = position - last[gram] > FAR
        last[gram] = position
        if trajectory.evidence[position]:
            evidence.add(gram)
    return copies


def _track(length: int) -> Track:
    def empty() -> Floats:
        return np.full(length, np.nan, dtype=np.float32)

    sums = np.zeros((len(Label), 4))
    return Track(empty(), empty(), np.full(length, -1), empty(), empty(), sums, sums.copy())


def _nll(logits: Tensor, truth: Tensor) -> Tensor:
    return -logits.gather(-1, truth[:, None])[:, 0]


def _by_phase(mass: Tensor, phases: Tensor) -> npt.NDArray[np.float64]:
    """`[labels, 4]` sums of a mass `[labels, L, Hkv, history]` by the phase of the key."""
    by_key = mass.sum(dim=(1, 2))
    sums = torch.zeros(by_key.shape[0], 4, device=mass.device).index_add_(1, phases.long(), by_key)
    result: npt.NDArray[np.float64] = sums.double().cpu().numpy()
    return result
