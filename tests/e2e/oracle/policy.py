"""The formulas of the `agentkv` policy, written for reading, one layer at a time."""

from dataclasses import dataclass, field

import torch

PHASES = ("others", "think", "act", "tool")


@dataclass
class Rings:
    """The newest queries of one session: `add` them in order, read them per layer as one union."""

    size: int = 8
    entries: dict[int, list[list[tuple[int, torch.Tensor]]]] = field(default_factory=dict)

    def add(self, layer: int, phase: int, position: int, query: torch.Tensor) -> None:
        """`query` [Hq, D] after RoPE."""
        ring = self.entries.setdefault(layer, [[] for _ in PHASES])[phase]
        ring.append((position, query))
        del ring[: -self.size]

    def queries(self, layer: int) -> torch.Tensor:
        """[U, Hq, D], phase by phase, oldest first."""
        return torch.stack([query for ring in self.entries[layer] for _, query in ring])

    def positions(self, layer: int) -> list[list[int]]:
        """Per phase, the positions of the ring's tokens, oldest first."""
        return [[position for position, _ in ring] for ring in self.entries[layer]]


def agentkv_scores(queries: torch.Tensor, keys: torch.Tensor, scale: float, pool: int = 7) -> torch.Tensor:
    """queries [U, Hq, D], keys [Hkv, n, D] -> [Hkv, n]."""
    heads, count, _ = keys.shape
    per_head = []
    for head in range(heads):
        group = queries.shape[1] // heads
        mine = queries[:, head * group : (head + 1) * group]
        logits = torch.einsum("ugd,nd->ugn", mine, keys[head]) * scale
        mass = logits.amax(dim=1).softmax(dim=-1).mean(dim=0)
        windows = torch.nn.functional.pad(mass, (pool // 2, pool // 2), value=-torch.inf).unfold(0, pool, 1)
        per_head.append(windows.amax(dim=-1)[:count])
    return torch.stack(per_head)


def keep_set(
    scores: torch.Tensor, positions: torch.Tensor, keep: int, sinks: int = 32, recent: int = 32
) -> torch.Tensor:
    """scores and positions [Hkv, n] -> sorted candidate indices [Hkv, keep]."""
    heads, count = scores.shape
    protected = positions < sinks
    protected[:, max(0, count - recent) :] = True
    chosen = []
    for head in range(heads):
        order = sorted(
            range(count),
            key=lambda i, head=head: (not protected[head, i], -float(scores[head, i]), i),
        )
        chosen.append(torch.tensor(sorted(order[:keep])))
    return torch.stack(chosen)


def tie_gap(scores: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> tuple[int, float]:
    """How two keep-sets of one head differ: the number of entries not shared, and the widest score gap among them.

    scores [n]; mine and theirs are candidate indices. Equal sets give (0, 0.0).
    """
    apart = sorted(set(mine.tolist()) ^ set(theirs.tolist()))
    if not apart:
        return 0, 0.0
    values = scores[torch.tensor(apart)]
    return len(apart) // 2, float(values.max() - values.min())
