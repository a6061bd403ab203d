"""The replay under other policies than agentkv, each formula written once more, token by token."""

from dataclasses import dataclass, field

import torch

from .policy import Rings
from .replay import Replay


@dataclass
class RecentReplay(Replay):
    """agentkv's score with the 32 newest queries of any phase."""

    rings: Rings = field(default_factory=lambda: Rings(32))

    def ring_of(self, phase: int) -> int:
        return 0


@dataclass
class StreamingReplay(Replay):
    """The newest tokens (and the sinks of the settings)."""

    def scores(self, layer: int) -> torch.Tensor:
        return self.positions[layer].float()


@dataclass
class SnapReplay(RecentReplay):
    """Mean causal attention of the 64 newest queries over older entries, smoothed over 5 neighbours."""

    rings: Rings = field(default_factory=lambda: Rings(64))

    def scores(self, layer: int) -> torch.Tensor:
        total = torch.stack([self.attention(layer, *entry) for entry in self.rings.entries[layer][0]]).mean(0)
        older = torch.nn.functional.pad(total[:, :-64], (2, 2)).unfold(1, 5, 1).mean(-1)
        return torch.cat([older, torch.zeros(len(total), 64)], dim=1)

    def attention(self, layer: int, position: int, query: torch.Tensor) -> torch.Tensor:
        """[Hkv, n] attention of one query [Hq, D], a mean over each KV head's group."""
        keys = self.keys[layer]
        grouped = query.view(len(keys), -1, query.shape[-1])
        logits = torch.einsum("hgd,hnd->hgn", grouped, keys) * self.scales[layer]
        hidden = self.positions[layer] > position
        return logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1).nan_to_num().mean(1)


@dataclass
class HeavyHitterReplay(SnapReplay):
    """Half of what stays is the newest, half has the largest sum of attention ever received."""

    rings: Rings = field(default_factory=lambda: Rings(128))
    noted: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [Hkv, n of the last compaction]
    counted: dict[int, int] = field(default_factory=dict)  # layer -> length at the last compaction

    def scores(self, layer: int) -> torch.Tensor:
        total = torch.zeros(self.positions[layer].shape)
        if layer in self.noted:
            total[:, : self.noted[layer].shape[1]] += self.noted[layer]
        for position, query in self.rings.entries[layer][0]:
            if position >= self.counted.get(layer, 0):
                total += self.attention(layer, position, query)
        self.noted[layer] = total
        return total

    def recent(self, keep: int) -> int:
        return max(self.settings.recent, keep // 2)

    def moved(self, layer: int, chosen: torch.Tensor) -> None:
        self.noted[layer] = self.noted[layer].gather(1, chosen)
        self.counted[layer] = self.length
