"""The cache of one arm (a policy at a budget) during a replay: dense buffers, query rings, compaction."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentkv_serve.engine.policies import AutoBudget, Policy, Rope, Window, entry_positions
from agentkv_serve.evaluation.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Arm:
    """One competitor: a policy at a budget of KV tokens per layer and KV head; with `auto`, at most that budget."""

    name: str
    policy: Policy
    budget: int
    say_phase: str = "others"
    noise: float = 0.0
    """Share of tokens whose label the policy sees wrong, drawn at random (ablation)."""
    auto: AutoBudget | None = None


class Cache:
    """Keys and values `[L, Hkv, C, D]` fp32 of one sequence; the first `held` of the C rows are filled."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        shape = (decoder.layers, decoder.kv_heads, capacity, decoder.head_dim)
        self.keys = torch.empty(shape, device=decoder.device)
        self.values = torch.empty_like(self.keys)
        self.held = 0

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` rows; content stays."""
        if capacity > self.keys.shape[2]:
            room = max(capacity, self.keys.shape[2] + 512)
            for name in ("keys", "values"):
                old: Tensor = getattr(self, name)
                new = old.new_empty(*old.shape[:2], room, old.shape[3])
                new[:, :, : self.held] = old[:, :, : self.held]
                setattr(self, name, new)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes `[Hkv, T, D]` behind the held rows of a layer; returns all of the layer's rows, the new ones too."""
        end = self.held + keys.shape[1]
        self.keys[layer, :, self.held : end] = keys
        self.values[layer, :, self.held : end] = values
        return self.keys[layer, :, :end], self.values[layer, :, :end]


class Session:
    """An arm's state. Until its first compaction it holds what the uncompressed row holds, and no copy of it.

    labels: int8 `[n]` labels of the whole sequence as the policy is to see them.
    """

    def __init__(
        self, decoder: Decoder, arm: Arm, labels: npt.NDArray[np.int8], name: str, rope: Rope | None = None
    ) -> None:
        self.arm = arm
        self.budget = min(arm.budget, max(arm.auto.floor, arm.policy.least_budget)) if arm.auto else arm.budget
        self._chosen = 0  # by budget auto
        self.cache: Cache | None = None
        self.positions: Tensor | None = None  # [L, Hkv, held at the last compaction] int32
        self.kept: Tensor | None = None  # [L, Hkv, since] bool: which of the tokens before `since` are held
        self.since = 0
        self.compactions: list[int] = []
        self._decoder = decoder
        self._labels = labels
        self._device_labels = torch.from_numpy(labels).to(decoder.device)
        self._rope = rope
        self._table = arm.policy.ring_table(arm.say_phase)
        self._seed = zlib.crc32(name.encode())
        self._carry: Tensor | None = None
        shape = (decoder.layers, arm.policy.ring_queries, decoder.query_heads, decoder.head_dim)
        self._ring = torch.zeros(shape, device=decoder.device)
        self._places = np.full(arm.policy.ring_queries, -1, dtype=np.int64)

    def held(self, length: int) -> int:
        """KV tokens per layer and head after `length` tokens."""
        return length if self.cache is None else self.cache.held

    def plan_capture(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Ring entries `[E]` that the tokens `[start, end)` fill, and which of these tokens fill them `[E]`."""
        self._places = entry_positions(self._labels[:end], self.arm.policy.samplers, self._table)
        fresh = np.flatnonzero(self._places >= start)
        entries = torch.from_numpy(fresh).to(self._ring.device)
        return entries, torch.from_numpy(self._places[fresh] - start).to(self._ring.device)

    def capture(self, layer: int, plan: tuple[Tensor, Tensor], queries: Tensor) -> None:
        """Writes the planned queries of one layer into the ring. queries: `[Hq, T, D]` after RoPE."""
        entries, tokens = plan
        if entries.numel():
            self._ring[layer, entries] = queries[:, tokens].transpose(0, 1)

    def compress(self, trunk: Cache, length: int) -> None:
        """Compresses the session to its budget after `length` tokens. `trunk` is the uncompressed row's cache.

        With an automatic budget the budget is decided first; where nothing can go, nothing is done.
        """
        source = self.cache or trunk
        window = self._window(source, length)
        if self.arm.auto:
            self.budget = self.arm.auto.choose(self.arm.policy, window, min(self.arm.budget, source.held))
            self._chosen = self.budget
            window = replace(window, keep=self.budget)
            if self.budget >= source.held:
                return
        choice = self.arm.policy.choose(window)
        kept = choice.kept
        if self.cache is None:
            self.cache = Cache(self._decoder, self.budget + 384)
        heads = torch.arange(kept.shape[1], device=kept.device)[:, None]
        for layer in range(self._decoder.layers):
            for name in ("keys", "values"):
                rows = getattr(source, name)[layer][heads, kept[layer]]  # a copy: the target may be the source
                getattr(self.cache, name)[layer, :, : kept.shape[-1]] = rows
        self.cache.held = kept.shape[-1]
        self.positions = window.positions.gather(-1, kept)
        self.kept = torch.zeros(*kept.shape[:2], length, dtype=torch.bool, device=kept.device)
        self.kept.scatter_(2, self.positions.long(), True)
        self._carry = choice.carry
        self.since = length
        self.compactions.append(length)

    def _window(self, source: Cache, length: int) -> Window:
        shape = (self._decoder.layers, self._decoder.kv_heads)
        device = self._decoder.device
        tail = torch.arange(self.since, length, dtype=torch.int32, device=device).expand(*shape, -1)
        positions = tail if self.positions is None else torch.cat((self.positions, tail), dim=-1)
        carry = self._carry
        if carry is not None:
            carry = torch.cat((carry, carry.new_zeros(*shape, length - self.since)), dim=-1)
        return Window(
            k_buffers=[layer[:, : source.held].transpose(0, 1) for layer in source.keys],
            v_buffers=[layer[:, : source.held].transpose(0, 1) for layer in source.values],
            slots=torch.arange(source.held, device=device),
            positions=positions,
            keep=min(self.budget, source.held),
            length=length,
            since=self.since,
            budget=self._chosen,
            queries=self._ring,
            query_positions=torch.from_numpy(self._places).to(device),
            labels=self._device_labels[:length],
            carry=carry,
            scale=self._decoder.scale,
            rope=self._rope,
            seed=self._seed + len(self.compactions),
        )
