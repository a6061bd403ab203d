"""Builds the runtime: first with the attention backend (the model is loaded, the pools exist), then with the cache."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from agentkv_serve.engine import runtime as runtime_module
from agentkv_serve.engine import served
from agentkv_serve.engine.automata import AutomatonBank
from agentkv_serve.engine.config import EngineConfig
from agentkv_serve.engine.metrics import WorkerMetrics
from agentkv_serve.engine.policies import AutoBudget, Policy, Rope
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.sessions import SessionTable
from agentkv_serve.engine.state import ModelShape, SessionSlots
from agentkv_serve.kernels.backend import Backend

logger = logging.getLogger(__name__)

BACKEND_NAME = "agentkv"
"""Name of our radix cache: a server started with this `--radix-cache-backend` runs with the AgentKV cache."""


class UnsupportedModelError(ValueError):
    """The model's attention is of a kind that the AgentKV cache cannot compress."""


def enabled() -> bool:
    """Whether this server was started with our cache. Without it the plug-in changes nothing."""
    from sglang.srt.runtime_context import get_memory

    return bool(get_memory().radix_cache_backend == BACKEND_NAME)


def ensure_runtime(runner: Any) -> Runtime:
    """The runtime of this process, created at the first attention backend that is built.

    Raises:
        UnsupportedModelError: by name, why the model cannot be served with a compressed cache.
    """
    known = runtime_module.current()
    if known is not None:
        return known
    config = EngineConfig.load()
    shape, layer_index = model_shape(runner)
    rows = runner.req_to_token_pool.req_to_token.shape[0]
    policies, rope = _policies(runner, config, shape)
    ring_queries = max(policy.ring_queries for policy in policies.values())
    slots = config.max_sessions or _session_slots(runner, config, shape, rows, ring_queries)
    device = shape.device
    runtime = Runtime(
        config=config,
        shape=shape,
        slots=SessionSlots(
            shape,
            rows=rows,
            slots=slots,
            ring_queries=ring_queries,
            rings=max(len(policy.samplers) for policy in policies.values()),
        ),
        sessions=SessionTable(config.tombstone_seconds),
        automata=AutomatonBank(_tokenizer(runner), device),
        layer_index=layer_index,
        kv_pool=runner.token_to_kv_pool,
        req_to_token=runner.req_to_token_pool.req_to_token,
        backend=_kernels(config, device),
        policies=policies,
        rope=rope,
        ranks=_ranks(),
        auto=AutoBudget(price=config.auto_price, epsilon=config.auto_epsilon, floor=config.auto_floor),
        metrics=WorkerMetrics(reports=_reports()),
    )
    # Positions (int32) and notes of kept entries are made at each compaction; at most the whole pool has them.
    note = max(policy.note_bytes for policy in policies.values())
    entries = runner.max_total_num_tokens * len(shape.attention_layers) * shape.kv_heads
    auxiliary = runtime.slots.nbytes + (4 + note) * entries
    runtime.metrics.started(auxiliary)
    runtime_module.install(runtime)
    pool_bytes = runner.max_total_num_tokens * shape.token_bytes()
    logger.info(
        "AgentKV cache: %d attention layers, %d KV heads of %d, %d session slots, auxiliary memory %.1f MiB (%.2f%% of "
        "the KV pool), %s kernels, policies %s",
        len(shape.attention_layers),
        shape.kv_heads,
        shape.head_dim,
        slots,
        auxiliary / 2**20,
        100 * auxiliary / pool_bytes,
        runtime.backend,
        ", ".join(policies),
    )
    return runtime


def model_shape(runner: Any) -> tuple[ModelShape, dict[int, int]]:
    """The attention that this rank runs, and each layer id's place among the attention layers.

    Raises:
        UnsupportedModelError: no attention layers, attention of differing shapes, or a kind that cannot be compressed.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    layers.sort(key=lambda layer: layer.layer_id)
    name = type(runner.model).__name__
    if runner.use_mla_backend:
        raise UnsupportedModelError(f"{name} has multi-head latent attention (MLA): its KV cache has no KV heads")
    if runner.kv_cache_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UnsupportedModelError(
            f"{name} asks for a KV cache of {runner.kv_cache_dtype}: scores would read quantised keys. "
            "Start with --kv-cache-dtype bfloat16"
        )
    if mambaish_config(runner.model_config) is not None:
        raise UnsupportedModelError(f"{name} has state-space or linear-attention layers, whose state cannot be cut")
    if runner.model_config.is_local_attention_model:
        raise UnsupportedModelError(f"{name} has chunked local attention")
    if not layers:
        raise UnsupportedModelError(f"{name} has no attention layers whose KV could be compressed")
    first = layers[0]
    for layer in layers:
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise UnsupportedModelError(f"{name}: layer {layer.layer_id} is not causal self-attention")
        if layer.sliding_window_size not in (None, -1):
            raise UnsupportedModelError(f"{name}: layer {layer.layer_id} has sliding-window attention")
        if layer.xai_temperature_len > 0:
            raise UnsupportedModelError(f"{name}: layer {layer.layer_id} scales attention by the number of cached keys")
        if _heads(layer) != _heads(first):
            raise UnsupportedModelError(
                f"{name}: layer {layer.layer_id} has (query heads, KV heads, head size, value size, scale) "
                f"{_heads(layer)}, layer {first.layer_id} has {_heads(first)}; they must be alike"
            )
    query_heads, kv_heads, head_dim, value_dim, scale = _heads(first)
    shape = ModelShape(
        attention_layers=tuple(layer.layer_id for layer in layers),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        scale=scale,
        dtype=runner.dtype,
        device=torch.device(runner.device),
    )
    return shape, {layer.layer_id: index for index, layer in enumerate(layers)}


def _heads(layer: Any) -> tuple[int, int, int, int, float]:
    return (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim, layer.scaling)


LEAST_BUDGET = 128
"""Smallest budget that the gateway allows: more sessions than the pool holds at it are of no use."""


def _policies(runner: Any, config: EngineConfig, shape: ModelShape) -> tuple[dict[str, Policy], Rope | None]:
    """The policies that this rank serves, and the model's rotation if one of them asks for it."""
    from sglang.srt.runtime_context import get_parallel

    policies = served.served_policies(config)
    needed = any(policy.needs_rope for policy in policies.values())
    rope = served.model_rope(runner.model, runner.model_config.hf_config).to(shape.device) if needed else None
    return served.of_model(policies, shape, get_parallel().tp_rank, rope), rope


def _ranks() -> Any:
    """The group of tensor-parallel ranks, None where there is one."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    return group if group.world_size > 1 else None


def _session_slots(runner: Any, config: EngineConfig, shape: ModelShape, rows: int, ring_queries: int) -> int:
    """As many as the rings' share of the KV pool allows, but no more than the pool can hold."""
    pool_bytes = runner.max_total_num_tokens * shape.token_bytes()
    ring_bytes = len(shape.attention_layers) * max(1, ring_queries) * shape.query_heads * shape.head_dim
    afforded = int(config.ring_share * pool_bytes / (ring_bytes * shape.dtype.itemsize))
    useful = runner.max_total_num_tokens // (LEAST_BUDGET + config.compress_every)
    return int(max(1, min(rows, useful, afforded)))


def _reports() -> bool:
    """Whether this rank tells Prometheus of the worker's sessions."""
    from sglang.srt.runtime_context import get_observability, get_parallel

    return bool(get_observability().enable_metrics) and get_parallel().tp_rank == 0


def _kernels(config: EngineConfig, device: torch.device) -> Backend:
    if config.kernels == "auto":
        return "torch" if device.type == "cpu" else "triton"
    if config.kernels not in ("torch", "triton"):
        raise ValueError(f"kernels must be auto, torch or triton, not {config.kernels!r}")
    return "torch" if config.kernels == "torch" else "triton"


def _tokenizer(runner: Any) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    args = runner.server_args
    return get_tokenizer(
        args.tokenizer_path or args.model_path,
        tokenizer_mode=args.tokenizer_mode,
        trust_remote_code=args.trust_remote_code,
        revision=args.revision,
    )


def build_cache(context: Any) -> Any:
    """SGLang's factory of our radix cache (`--radix-cache-backend agentkv`). Verifies the hooks first."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.runtime_context import attention_backends

    from agentkv_serve.engine import flags, selfcheck
    from agentkv_serve.engine.cache import AgentKVRadixCache

    selfcheck.require_hooks()
    flags.refuse(resolved_view(context.server_args))
    for name in attention_backends():
        if name not in BACKENDS:
            raise flags.RefusedFlagError(
                f"--attention-backend {name} cannot read a compressed window; use one of {', '.join(BACKENDS)}"
            )
    runtime = runtime_module.current()
    if runtime is None:
        selfcheck.stop("no AgentKV attention backend was built: start the server with `agentkv engine`")
    assert runtime is not None
    flags.refuse_prefill_graph(runtime.shape.device.type)
    runtime.tree = create_unified_radix_cache(context, cache_class=AgentKVRadixCache)
    return runtime.tree


BACKENDS = {
    "torch_native": "agentkv_serve.engine.attention.torch_native.WindowTorchNative",
    "triton": "agentkv_serve.engine.attention.triton.WindowTriton",
    "flashinfer": "agentkv_serve.engine.attention.flashinfer.WindowFlashInfer",
    "fa3": "agentkv_serve.engine.attention.fa3.WindowFlashAttention",
}
"""Our attention backends, under the names of those of SGLang's that they extend. Imported when one is built."""


def window_factory(backend: str, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The factory that stands in SGLang's registry in place of `stock`; without our cache it builds the same."""

    def create(runner: Any) -> Any:
        if not enabled():
            return stock(runner)
        return pkgutil.resolve_name(backend)(runner, ensure_runtime(runner))

    return create
