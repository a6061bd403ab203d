"""`GET /agentkv/kv_map`: which tokens of a session are still held, and what its turns and compactions were.

On demand only. The HTTP process asks the scheduler over SGLang's own round trip for internal state, whose request has
one free text field; the scheduler answers between two batches, with one count over the kept positions.
"""

from __future__ import annotations

import base64
import dataclasses
import sys
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from agentkv_serve.engine import runtime as runtime_module
from agentkv_serve.engine.runtime import Runtime
from agentkv_serve.engine.sessions import KvState, SessionRecord

PATH = "/agentkv/kv_map"
VERSION = 1
ALL_LAYERS = -1
_QUESTION = "agentkv:kv_map:"
_DIGITS = 6  # of a layer's number: the scheduler reads it, and must not be given one that it cannot read
_SERVER = "sglang.srt.entrypoints.http_server"


def after_app_is_made(_: None, app: Any) -> None:
    """Adds the route, where SGLang's HTTP server is made: its own metrics hook in there is called at that moment."""
    app.add_route(PATH, kv_map, methods=["GET"])


async def kv_map(request: Request) -> Response:
    """The KV map of `?session=KEY`, over all layers or of `&layer=N` (its place among the attention layers)."""
    key, layer = request.query_params.get("session", ""), request.query_params.get("layer", str(ALL_LAYERS))
    if not key or not layer.removeprefix("-").isdecimal() or len(layer) > _DIGITS:
        return JSONResponse({"error": "kv_map needs ?session=KEY and takes &layer=NUMBER"}, 400)
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = sys.modules[_SERVER]._global_state.tokenizer_manager
    manager.auto_create_handle_loop()
    question = GetInternalStateReq(rid=f"{_QUESTION}{layer}:{key}")
    answer = dict((await manager.get_internal_state_communicator(question))[0].internal_state)
    return JSONResponse(answer, answer.pop("status"))


def around_get_internal_state(original: Any, scheduler: Any, request: Any) -> Any:
    """Answers our question; every other one is SGLang's."""
    if not (request.rid or "").startswith(_QUESTION):
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    layer, key = request.rid.removeprefix(_QUESTION).split(":", 1)
    return GetInternalStateReqOutput(internal_state=answer(runtime_module.current(), key, int(layer)))


def answer(runtime: Runtime | None, key: str, layer: int = ALL_LAYERS) -> dict[str, Any]:
    """The map of one session, with the HTTP `status` of the reply.

    `kept` is the base64 of `length` little-endian uint16: how many (layer, KV head) pairs hold each token, out of
    `levels`. With tensor parallelism these are the heads of rank 0. Token counts are per layer and KV head.
    """
    record = runtime.sessions.get(key) if runtime else None
    if runtime is None or record is None:
        return {"status": 404, "error": "this worker knows no such session"}
    layers, heads = len(runtime.shape.attention_layers), runtime.shape.kv_heads
    if not ALL_LAYERS <= layer < layers:
        return {"status": 400, "error": f"layer must be from 0 to {layers - 1}"}
    slot = runtime.tree.session.slots.get(key)
    length = int(slot.kv.kv_committed_len) if slot is not None and slot.kv.holds_kv else 0
    start = runtime.start_of(slot.kv) if length else 0
    return {
        "status": 200,
        "v": VERSION,
        "session": key,
        "epoch": record.epoch,
        "state": "running" if record.running else "idle" if length else "lost",
        "reason": record.lost,
        "length": length,
        "held": length - start,
        "evicted": start,
        "layers": layers,
        "kv_heads": heads,
        "layer": None if layer == ALL_LAYERS else layer,
        "levels": heads * (layers if layer == ALL_LAYERS else 1),
        "kept": _pack(holders(record.kv, length, layers, heads, layer)),
        **history(record),
    }


def holders(kv: KvState | None, length: int, layers: int, heads: int, layer: int = ALL_LAYERS) -> Tensor:
    """[length] int64: how many (layer, KV head) pairs hold each token; of one `layer`, how many KV heads."""
    rows = heads * (layers if layer == ALL_LAYERS else 1)
    if kv is None or kv.kept is None:
        return torch.full((length,), rows)
    chosen = kv.kept if layer == ALL_LAYERS else kv.kept[layer]
    counts = torch.bincount(chosen.flatten().to(torch.int64), minlength=length)
    counts[kv.start + kv.kept.shape[-1] :] += rows  # appended since the last compaction: held everywhere
    return counts


def history(record: SessionRecord) -> dict[str, Any]:
    """The session's last turns and compactions, oldest first."""
    turns = []
    for turn in record.turns:
        entry = dataclasses.asdict(turn)
        turns.append(entry.pop("facts") | entry)
    return {"turns": turns, "compactions": [dataclasses.asdict(event) for event in record.compactions]}


def _pack(counts: Tensor) -> str:
    return base64.b64encode(counts.cpu().numpy().astype("<u2").tobytes()).decode()
