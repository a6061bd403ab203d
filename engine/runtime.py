"""The one runtime object of a worker process: what all hooks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from agentkv_serve.engine.automata import AutomatonBank
from agentkv_serve.engine.capture import CapturePlan
from agentkv_serve.engine.config import EngineConfig
from agentkv_serve.engine.metrics import WorkerMetrics
from agentkv_serve.engine.policies import AutoBudget, Policy, Rope
from agentkv_serve.engine.sessions import SessionTable
from agentkv_serve.engine.state import ModelShape, SessionSlots
from agentkv_serve.engine.turn import Forced, Turn
from agentkv_serve.kernels.backend import Backend


@dataclass(slots=True)
class Runtime:
    """Created with the attention backend, completed when the scheduler builds its cache."""

    config: EngineConfig
    shape: ModelShape
    slots: SessionSlots
    sessions: SessionTable
    automata: AutomatonBank
    layer_index: dict[int, int]  # layer id -> place among the attention layers
    kv_pool: Any  # SGLang's MHATokenToKVPool
    req_to_token: torch.Tensor  # [rows, context] int32
    backend: Backend  # kernels: torch or triton
    policies: dict[str, Policy]  # those that this worker serves, by name
    auto: AutoBudget = field(default_factory=AutoBudget)
    ranks: Any = None  # SGLang's group of tensor-parallel ranks; None: there is one rank only
    rope: Rope | None = None  # None: no served policy asks for it
    metrics: WorkerMetrics = field(default_factory=lambda: WorkerMetrics(reports=False))
    tree: Any = None  # AgentKVRadixCache
    scheduler: Any = None
    plan: CapturePlan | None = None  # what the running forward captures
    uncompressed_limit: int = 0  # longest prompt + 1 that fits without compression, as SGLang computed it
    deferred: list[Any] = field(default_factory=list)  # requests that wait for an aborted turn's end
    dumped: int = 0  # files written for tests
    starts: list[int] = field(default_factory=list)  # window start of each request of the running forward
    force_window: bool = False  # the running forward takes the window path even if nothing is compressed
    forced: Forced | None = None  # tokens that the running forward has to yield
    settling: str | None = None  # session whose finished turn is being compressed: SGLang calls it idle already
    arriving: Turn | None = None  # the turn whose request SGLang is creating right now

    def start_of(self, kv: Any) -> int:
        """First valid row position of an SGLang KV record (0 = nothing was compressed)."""
        record = self.sessions.by_row(kv.req_pool_idx)
        return 0 if record is None or record.kv is None else record.kv.start

    def drop_row(self, row: int | None) -> None:
        """Forgets the compressed state in a row; its session slot is free again."""
        if row is None:
            return
        kv = self.sessions.drop_row(row)
        if kv is not None:
            self.slots.give_back(kv.slot)
            self.slots.row_slot[row] = 0
            self.slots.start[row] = 0


_runtime: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process; None in processes that run no model, and in servers without our cache."""
    return _runtime


def install(runtime: Runtime) -> None:
    """Makes `runtime` the one of this process.

    Raises:
        RuntimeError: there is one already.
    """
    global _runtime
    if _runtime is not None:
        raise RuntimeError("this process has an AgentKV runtime already")
    _runtime = runtime
