"""Which rings' queries the next tokens will ask with: a Markov chain over the session's own tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentkv_serve.engine.policies.sampler import rings_of
from agentkv_serve.phase_tagger import Label

# What is believed of an agent's loop before the session has shown its own: per label the tokens of a span, and what
# comes next how often. Counted as one span each.
_SPAN = {Label.INPUT: 60, Label.THINK: 60, Label.ACT: 40, Label.TOOL: 120, Label.SAY: 50, Label.GLUE: 6}
_NEXT = {
    Label.INPUT: {Label.GLUE: 1.0},
    Label.THINK: {Label.ACT: 0.7, Label.SAY: 0.3},
    Label.ACT: {Label.TOOL: 0.9, Label.GLUE: 0.1},
    Label.TOOL: {Label.GLUE: 1.0},
    Label.SAY: {Label.ACT: 0.3, Label.GLUE: 0.7},
    Label.GLUE: {Label.THINK: 0.4, Label.ACT: 0.2, Label.SAY: 0.2, Label.INPUT: 0.2},
}


def transition_matrix(labels: npt.NDArray[np.int8]) -> npt.NDArray[np.float64]:
    """[6, 6] probability that a token of one label is followed by one of another: the session's counts and a prior."""
    counts = np.zeros((len(Label), len(Label)))
    for label, length in _SPAN.items():
        counts[label, label] += length - 1
        for following, share in _NEXT[label].items():
            counts[label, following] += share
    np.add.at(counts, (labels[:-1], labels[1:]), 1.0)
    return np.asarray(counts / counts.sum(1, keepdims=True))


def expected_shares(
    labels: npt.NDArray[np.int8], table: tuple[int, ...], rings: int, doublings: int = 8
) -> npt.NDArray[np.float64]:
    """[rings] expected share of the next 2^doublings tokens that belong to each ring; sums to 1 where every label has a
    ring (labels that keep the last ring count as the ring of the label before them)."""
    step = transition_matrix(labels)
    total = np.eye(len(step))  # sum of the powers 0 .. n-1, doubled below
    power = step
    for _ in range(doublings):
        total, power = total + power @ total, power @ power
    now = np.zeros(len(Label))
    now[labels[-1]] = 1.0
    share = now @ step @ total / (1 << doublings)
    result = np.zeros(rings)
    last = int(rings_of(labels, table)[-1])
    for label in Label:
        ring = table[label] if table[label] != -1 else last
        if 0 <= ring < rings:
            result[ring] += share[label]
    return result
