"""Teacher-forced replay of a trajectory: every arm attends its own compressed cache, so that errors add up.

Compactions happen where the engine has them: after every prompt chunk and at the end of a turn when more than the
budget is held (policies that compress prefills), and every `every` generated tokens (all policies). A turn's last token
is computed with the next prompt, as in the engine, which samples it without running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentkv_serve.evaluation.decoder import Decoder, causal_mask
from agentkv_serve.evaluation.session import Cache, Session
from agentkv_serve.evaluation.trajectory import Trajectory

Watch = Callable[[int, Tensor, Tensor], None]
"""`(layer, q [Hq, T, D], k [Hkv, S, D])` of the uncompressed row, for attention statistics."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of the tokens `[start, end)`. Row 0 is the uncompressed one; `rows[i]` is session i's."""

    start: int
    end: int
    generated: bool
    hidden: Tensor = field(repr=False)  # [M, T, H] fp32 after the last norm
    rows: Sequence[int]


def replay(
    decoder: Decoder,
    trajectory: Trajectory,
    sessions: Sequence[Session],
    *,
    chunk: int = 128,
    every: int = 128,
    watch: Watch | None = None,
) -> Iterator[Step]:
    """Runs all sessions over a trajectory, one pass over the weights per step; compresses after each step is taken.

    chunk: most tokens of a forward; prompt chunks of this length are the engine's prefill chunks. watch: called for
    every layer of the steps over generated tokens.
    """
    run = _Run(decoder, trajectory, sessions, watch)
    position = 0
    for span in trajectory.spans:
        if not span.generated:
            continue
        while position < span.start:
            end = min(position + chunk, span.start)
            yield run.step(position, end, False)
            position = end
            run.compress(position, every, "chunk")
        last = span.end - 1
        while position < last:
            end = min(last, position + chunk, position + run.distance(position, every))
            yield run.step(position, end, True)
            position = end
            if position < last:
                run.compress(position, every, "decode")
        run.compress(position, every, "turn")


def first_compaction(trajectory: Trajectory, budget: int, *, chunk: int = 128, every: int = 128) -> int | None:
    """Where a policy that compresses prefills is first compressed; None if the trajectory ends before."""
    position = 0
    for span in trajectory.spans:
        if not span.generated:
            continue
        ends: list[int] = [*range(position + chunk, span.start, chunk), span.start]
        for end in ends:
            if end > budget:
                return end
        last = span.end - 1
        if budget + every < last:
            return budget + every
        if last > budget:
            return last
        position = last
    return None


class _Run:
    def __init__(
        self, decoder: Decoder, trajectory: Trajectory, sessions: Sequence[Session], watch: Watch | None
    ) -> None:
        self._decoder = decoder
        self._sessions = sessions
        self._watch = watch
        self._ids = torch.from_numpy(trajectory.ids).to(decoder.device)
        self._trunk = Cache(decoder, len(trajectory.ids))
        self._rotation = decoder.rotation(len(trajectory.ids))

    def distance(self, position: int, every: int) -> int:
        """Tokens until the first session is due."""
        due = [s.budget + every - s.held(position) for s in self._sessions if s.arm.policy.compresses]
        return max(1, min(due, default=every))

    def compress(self, position: int, every: int, after: Literal["chunk", "decode", "turn"]) -> None:
        for session in self._sessions:
            policy = session.arm.policy
            slack = {
                "chunk": max(1, policy.prefill_slack),
                "decode": every,
                "turn": max(1, min(policy.prefill_slack, every)),
            }[after]
            due = policy.compresses and session.held(position) >= session.budget + slack
            if due and (policy.compress_prefill or after == "decode"):
                session.compress(self._trunk, position)

    def step(self, start: int, end: int, generated: bool) -> Step:
        decoder, count = self._decoder, end - start
        caches = [self._trunk]
        rows = []
        for session in self._sessions:
            if session.cache is not None:
                session.cache.reserve(session.cache.held + count)
                caches.append(session.cache)
            rows.append(len(caches) - 1 if session.cache is not None else 0)
        plans = [session.plan_capture(start, end) for session in self._sessions]
        masks: dict[int, Tensor] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed = torch.empty_like(q)
            for row, cache in enumerate(caches):
                keys, values = cache.put(layer, k[row], v[row])
                held = keys.shape[1]
                if held not in masks:
                    masks[held] = causal_mask(count, held, decoder.device)
                mixed[row] = scaled_dot_product_attention(
                    q[row : row + 1], keys[None], values[None], masks[held], scale=decoder.scale, enable_gqa=True
                )[0]
            for session, row, plan in zip(self._sessions, rows, plans, strict=True):
                session.capture(layer, plan, q[row])
            if generated and self._watch is not None:
                self._watch(layer, q[0], self._trunk.keys[layer, :, :end])
            return mixed

        rotation = (self._rotation[0][start:end], self._rotation[1][start:end])
        hidden = decoder.forward(self._ids[start:end], len(caches), rotation, attend)
        for cache in caches:
            cache.held += count
        return Step(start, end, generated, hidden, rows)
