"""Query statistics of a model, in the file format of TriAttention (which TensorRT-LLM reads too).

A torch file of {"metadata": {...}, "stats": {"layerLL_headHH": {"q_mean_real", "q_mean_imag", "q_abs_mean"}}}, one
entry per layer and query head, each a vector over the F rotary pairs of queries before RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class StatisticsError(ValueError):
    """A statistics file that is missing, malformed, or made for another model."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Per attention layer and query head: complex mean of the queries' rotary pairs, and mean of their absolute value.

    mean       complex64 [L, Hq, F]
    magnitude  fp32 [L, Hq, F]
    """

    mean: Tensor
    magnitude: Tensor

    @classmethod
    def load(cls, path: Path) -> Statistics:
        """Reads a file.

        Raises:
            StatisticsError: it cannot be read, or heads are missing; the message says which.
        """
        try:
            stats: dict[str, dict[str, Tensor]] = torch.load(path, map_location="cpu", weights_only=True)["stats"]
            heads = sorted((int(name[5 : name.index("_")]), int(name.rpartition("head")[2])) for name in stats)
            layers = sorted({layer for layer, _ in heads})
            count = max(head for _, head in heads) + 1
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            raise StatisticsError(f"{path} is no statistics file ({error}); `agentkv calibrate` writes one") from None
        missing = [(layer, head) for layer in layers for head in range(count) if _key(layer, head) not in stats]
        if missing:
            raise StatisticsError(f"{path} has no statistics of {len(missing)} heads, first (layer, head) {missing[0]}")
        rows = [[stats[_key(layer, head)] for head in range(count)] for layer in layers]
        mean = torch.stack(
            [
                torch.stack([torch.complex(r["q_mean_real"].float(), r["q_mean_imag"].float()) for r in row])
                for row in rows
            ]
        )
        return cls(mean, torch.stack([torch.stack([r["q_abs_mean"].float() for r in row]) for row in rows]))

    def save(self, path: Path, metadata: dict[str, Any]) -> None:
        """Writes a file; `metadata` joins what the format asks for."""
        layers, heads, _ = self.mean.shape
        names = [(layer, head) for layer in range(layers) for head in range(heads)]
        stats = {
            _key(layer, head): {
                "q_mean_real": self.mean[layer, head].real.clone(),
                "q_mean_imag": self.mean[layer, head].imag.clone(),
                "q_abs_mean": self.magnitude[layer, head].clone(),
            }
            for layer, head in names
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"metadata": {**metadata, "sampled_heads": [list(name) for name in names]}, "stats": stats}, path)

    def of_rank(self, layers: int, first_head: int, heads: int, device: torch.device) -> Statistics:
        """The query heads `first_head` on of one tensor-parallel rank, on its device.

        Raises:
            StatisticsError: another number of layers, or too few heads: the file is of another model.
        """
        if self.mean.shape[0] != layers or first_head + heads > self.mean.shape[1]:
            raise StatisticsError(
                f"the statistics are of {self.mean.shape[0]} layers with {self.mean.shape[1]} query heads; this model "
                f"has {layers} layers and needs heads {first_head} to {first_head + heads - 1}: calibrate this model"
            )
        part = slice(first_head, first_head + heads)
        return Statistics(self.mean[:, part].to(device), self.magnitude[:, part].to(device))


def _key(layer: int, head: int) -> str:
    return f"layer{layer:02d}_head{head:02d}"
