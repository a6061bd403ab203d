"""Paged decode attention for the stand-alone loop: SGLang brings its own, which needs all of SGLang to be
installed."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from agentkv_serve.kernels.backend import Backend, resolve
from agentkv_serve.kernels.paged import ELEMENT

_LOG2_E = 1.4426950408889634


def decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    *,
    splits: int,
    backend: Backend | None = None,
) -> torch.Tensor:
    """`[R, Hq, D]`: softmax attention of one query per request over the slots `indices[indptr[r] : indptr[r +
    1]]`.

    queries: `[R, Hq, D]`; keys, values: the paged pool `[S, Hkv, D]` of one layer; splits: programs that
    share a request's keys. The Triton path can be recorded in a CUDA graph.
    """
    if resolve(backend, queries.device) == "torch":
        return _reference(queries, keys, values, indptr, indices)
    rows, hq, dim = queries.shape
    hkv = keys.shape[1]
    group = hq // hkv
    partial = torch.empty(rows, hq, splits, dim, device=queries.device)
    lse = torch.empty(rows, hq, splits, device=queries.device)
    exact = queries.dtype == keys.dtype and queries.dtype.itemsize == 2
    if queries.dtype == torch.bfloat16 and not isinstance(_attention_kernel, triton.JITFunction):
        exact = False  # Triton's interpreter has no bfloat16 product
    _attention_kernel[(splits, hkv, rows)](
        queries, keys, values, indptr, indices, partial, lse,
        dim**-0.5 * _LOG2_E, dim, splits, *queries.stride()[:2], *keys.stride()[:2],
        HQ=hq, G=group, COMPUTE=ELEMENT[queries.dtype] if exact else tl.float32,
        BLOCK_N=64, BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4, num_stages=2 if dim <= 128 else 1,
    )  # fmt: skip
    weight = (lse - lse.amax(-1, keepdim=True)).exp2()
    return ((partial * weight[..., None]).sum(2) / weight.sum(-1, keepdim=True)).to(queries.dtype)


def _reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
) -> torch.Tensor:
    out = torch.empty_like(queries)
    hkv, dim = keys.shape[1:]
    bounds = indptr.tolist()
    for row, query in enumerate(queries):
        slots = indices[bounds[row] : bounds[row + 1]].long()
        k, v = keys[slots].float().transpose(0, 1), values[slots].float().transpose(0, 1)  # [Hkv, N, D]
        logits = query.float().view(hkv, -1, dim) @ k.transpose(1, 2) * dim**-0.5
        out[row] = (logits.softmax(-1) @ v).view(-1, dim).to(out.dtype)
    return out


@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, indptr_ptr, indices_ptr, partial_ptr, lse_ptr,
    scale, D, splits, q_row_stride, q_head_stride, slot_stride, head_stride,
    HQ: tl.constexpr, G: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One request, KV head and split: normalised partial output and its base-2 log-sum-exp."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.load(indptr_ptr + row)
    length = tl.load(indptr_ptr + row + 1) - first
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    begin = split * share
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    live = (g < G)[:, None] & (d < D)[None, :]
    q_place = q_ptr + row * q_row_stride + (head * G + g)[:, None] * q_head_stride + d[None, :]
    q = tl.load(q_place, mask=live, other=0.0).to(COMPUTE)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin, tl.minimum(begin + share, length), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        slot = tl.load(indices_ptr + first + n, mask=n < length, other=0).to(tl.int64)
        place = slot[:, None] * slot_stride + head * head_stride + d[None, :]
        inside = (n < length)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + place, mask=inside, other=0.0).to(COMPUTE)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where((n < length)[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, axis=1))
        fade, mass = tl.exp2(top - higher), tl.exp2(logits - higher[:, None])
        v = tl.load(v_ptr + place, mask=inside, other=0.0).to(COMPUTE)
        out = out * fade[:, None] + tl.dot(mass.to(COMPUTE), v, input_precision="ieee")
        total = total * fade + tl.sum(mass, axis=1)
        top = higher
    some = total > 0.0
    target = (row * HQ + head * G + g) * splits + split
    out = tl.where(some[:, None], out / tl.where(some, total, 1.0)[:, None], 0.0)
    tl.store(partial_ptr + target[:, None] * D + d[None, :], out, mask=live)
    tl.store(lse_ptr + target, tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf")), mask=g < G)
