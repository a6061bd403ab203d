"""A decode loop of the shape of a real model, on random weights: what the AgentKV cache gains, without an
engine.

One layer's weights serve all layers: the traffic per step is that of the whole model, the memory that of one
layer. The prompt's keys and values are random. The step is written for a CUDA graph (static shapes, no read
on the host); compaction runs between replays, as it does in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm, silu

from agentkv_serve.check.attention import decode_attention
from agentkv_serve.kernels import capture, compact, phase_step, score, select, window_indices
from agentkv_serve.kernels.backend import Backend

PHASES, QUERIES = 4, 8
SINKS, RECENT = 32, 32


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3-like dense model."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


QWEN3_8B = Shape(36, 4096, 32, 8, 128, 12_288, 151_936)
TINY = Shape(2, 64, 4, 2, 32, 96, 300)


class DecodeLoop:
    """`batch` requests of `context` tokens each, decoded for up to `steps` tokens.

    budget: KV tokens per layer and KV head, or None for the full cache; a request is compressed to it before
    the first step and whenever it has grown by `interval` tokens. All state lives on the device; only
    lengths, which every request shares, are known to the host too.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        batch: int,
        context: int,
        steps: int,
        budget: int | None,
        interval: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
        seed: int = 0,
    ) -> None:
        self.shape, self.budget, self.interval, self.backend = shape, budget, interval, backend
        self.random = torch.Generator(device=device).manual_seed(seed)
        self.device, self.dtype, self.batch = device, dtype, batch
        self.length, self.start_host = context, 0
        longest = context if budget is None else min(context, budget + interval)
        # About 512 keys per program keep all processors busy from batch 1 on.
        self.splits = max(1, min(64, longest // 512))
        self._make_weights()
        self._make_cache(context, steps)

    def _normal(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        content = torch.empty(*size, dtype=self.dtype, device=self.device)
        return content.normal_(generator=self.random).mul_(scale)

    def _make_weights(self) -> None:
        s = self.shape
        width = (s.q_heads + 2 * s.kv_heads) * s.head_dim
        self.qkv = self._normal(width, s.hidden, scale=s.hidden**-0.5)
        self.out = self._normal(s.hidden, s.q_heads * s.head_dim, scale=s.hidden**-0.5)
        self.up = self._normal(2 * s.intermediate, s.hidden, scale=s.hidden**-0.5)
        self.down = self._normal(s.hidden, s.intermediate, scale=s.intermediate**-0.5)
        self.embedding, self.head = self._normal(s.vocabulary, s.hidden), self._normal(s.vocabulary, s.hidden)
        pairs = torch.arange(s.head_dim // 2, device=self.device, dtype=torch.float32)
        self.frequencies = 1e6 ** (-2 * pairs / s.head_dim)

    def _make_cache(self, context: int, steps: int) -> None:
        s, device, rows = self.shape, self.device, self.batch + 1  # row 0 belongs to padding
        total = self.batch * (context + steps)
        self.k = [self._normal(total + 1, s.kv_heads, s.head_dim) for _ in range(s.layers)]
        self.v = [self._normal(total + 1, s.kv_heads, s.head_dim) for _ in range(s.layers)]
        slots = torch.randperm(total, generator=self.random, device=device, dtype=torch.int32) + 1
        self.req_to_token = torch.zeros(rows, context + steps, dtype=torch.int32, device=device)
        self.req_to_token[1:] = slots.view(self.batch, -1)
        self.rows = torch.arange(1, rows, device=device)
        self.start = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seq_lens = torch.full((self.batch,), context, dtype=torch.int64, device=device)
        self.indices = torch.zeros(total, dtype=torch.int32, device=device)
        self.ring = self._normal(rows, s.layers, PHASES, QUERIES, s.q_heads, s.head_dim)
        self.ring_next = torch.zeros(rows, PHASES, dtype=torch.int64, device=device)
        self.states = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(self.batch, dtype=torch.int64, device=device)
        shape = (5, s.vocabulary)
        self.next_state = torch.randint(5, shape, generator=self.random, device=device).short()
        self.label = torch.randint(PHASES, shape, generator=self.random, device=device).to(torch.int8)
        self.every_query = torch.ones(PHASES * QUERIES, dtype=torch.bool, device=device)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(self.dtype)

    def step(self) -> None:
        """Read the last tokens, write their keys and values, choose the next ones. Can be recorded in a CUDA
        graph."""
        s, rows = self.shape, self.rows
        read, state = phase_step.step(
            self.next_state, self.label, self.states[rows], self.tokens, backend=self.backend
        )  # fmt: skip
        self.states[rows] = state
        phase = read.long()
        position = self.ring_next[rows, phase]
        self.ring_next[rows, phase] = (position + 1) % QUERIES

        slot = self.req_to_token[rows, self.seq_lens].long()
        angles = self.seq_lens[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        self.seq_lens += 1
        indptr, indices = window_indices.window_indices(
            self.req_to_token, rows, self.start, self.seq_lens, out=self.indices, backend=self.backend
        )
        x = self.embedding[self.tokens]
        for layer in range(s.layers):
            qkv = linear(rms_norm(x, x.shape[-1:]), self.qkv).view(self.batch, -1, s.head_dim)
            q, k, v = torch.split(qkv, [s.q_heads, s.kv_heads, s.kv_heads], 1)
            q = self._rotate(rms_norm(q, q.shape[-1:]), cos, sin)
            self.k[layer][slot] = self._rotate(rms_norm(k, k.shape[-1:]), cos, sin)
            self.v[layer][slot] = v
            capture.write(self.ring, layer, q, rows, phase, position, backend=self.backend)
            mixed = decode_attention(
                q, self.k[layer], self.v[layer], indptr, indices, splits=self.splits, backend=self.backend
            )
            x = x + linear(mixed.flatten(1), self.out)
            gate, up = linear(rms_norm(x, x.shape[-1:]), self.up).chunk(2, -1)
            x = x + linear(silu(gate) * up, self.down)
        logits = linear(rms_norm(x, x.shape[-1:]), self.head)
        self.tokens.copy_(logits.argmax(-1))

    def compress(self) -> None:
        """Cut every request to the budget: score, select, move, and give the freed slots to the tokens to
        come."""
        assert self.budget is not None
        first = self.length - self.budget
        count = self.length - self.start_host
        protected = torch.zeros(count, dtype=torch.bool, device=self.device)
        protected[:SINKS] = protected[-RECENT:] = True
        for row in range(1, self.batch + 1):
            source = self.req_to_token[row, self.start_host : self.length].long()
            scores = score.attention_mass_layers(
                self.ring[row].flatten(1, 2),
                self.every_query,
                self.k,
                source,
                scale=self.shape.head_dim**-0.5,
                backend=self.backend,
            )
            kept = select.top_keep(scores, self.budget, protected, validate=False, backend=self.backend)
            compact.gather_write(
                self.k, self.v, source, kept, source[-self.budget :], shifted=True, backend=self.backend
            )
            freed = source[: -self.budget][: self.req_to_token.shape[1] - self.length].int()
            self.req_to_token[row, self.length : self.length + len(freed)] = freed
            self.start[row] = first
        self.start_host = first

    def due(self) -> bool:
        """Whether the requests have outgrown their budget by an interval (or were never cut)."""
        if self.budget is None:
            return False
        return self.length - self.start_host >= self.budget + self.interval

    def record(self) -> torch.cuda.CUDAGraph:
        """Record one step in a CUDA graph; the state is as before."""
        state = (self.tokens, self.states, self.seq_lens, self.ring, self.ring_next)
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for tensor, content in zip(state, before, strict=True):
            tensor.copy_(content)
        return graph

    def run(self, steps: int, graph: torch.cuda.CUDAGraph | None = None) -> torch.Tensor:
        """Decode `steps` tokens, compressing when due; returns the chosen tokens `[steps, batch]`."""
        chosen = []
        for _ in range(steps):
            if self.due():
                self.compress()
            if graph is None:
                self.step()
            else:
                graph.replay()
            self.length += 1
            chosen.append(self.tokens.clone())
        return torch.stack(chosen)
