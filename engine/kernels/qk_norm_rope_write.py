"""Per-head norm of q and k, rotary turn, and the write of k and v to the paged cache, in one launch.

Twin: `TorchOps.qk_norm_rope_write`. Everything between load and store is fp32, rounded once.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.overlap import between_linears

HEADS_PER_PROGRAM = 8
"""At most. A program's heads are all of one kind (q, k or v), so this is cut to a power of two that divides both."""


def qk_norm_rope_write(
    qkv: torch.Tensor,
    qk_norm: torch.Tensor | None,
    eps: float,
    rope: torch.Tensor,
    write_slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Shapes as in `Ops.qk_norm_rope_write`; returns q as [T, heads, head_dim]. head_dim must be a power of two."""
    tokens, (kv_heads, dim) = qkv.shape[0], keys.shape[2:]
    all_heads = qkv.shape[1] // dim
    heads = all_heads - 2 * kv_heads
    common = gcd(heads, kv_heads)
    block = min(common & -common, HEADS_PER_PROGRAM)
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    overlap = between_linears(tokens, qkv.device)
    qk_norm_rope_write_kernel[(tokens, all_heads // block)](
        qkv,
        q if qk_norm is None else qk_norm,
        rope,
        write_slots,
        keys,
        values,
        q,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK=block,
        NORM=qk_norm is not None,
        OVERLAP=overlap,
        num_warps=max(1, min(4, block * dim // 256)),
        **({"launch_pdl": True} if overlap else {}),
    )
    return q


@triton.jit
def qk_norm_rope_write_kernel(
    qkv,
    qk_norm,
    rope,
    write_slots,
    keys,
    values,
    q_out,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK  # of the q, k and v heads side by side
    head = first + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM)
    raw = tl.load(row + head[:, None] * DIM + d[None, :])
    slot = tl.load(write_slots + token)
    if OVERLAP:
        gdc_launch_dependents()

    if first >= HEADS + KV_HEADS:
        v_head = head - (HEADS + KV_HEADS)
        tl.store(values + (slot * KV_HEADS + v_head[:, None]) * DIM + d[None, :], raw)
    else:
        # The turn pairs d with its partner half a head away: loaded a second time, from the same cache lines.
        partner = (d + DIM // 2) % DIM
        x = raw.to(tl.float32)
        y = tl.load(row + head[:, None] * DIM + partner[None, :]).to(tl.float32)
        if NORM:
            weight = qk_norm + (first >= HEADS).to(tl.int32) * DIM
            scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / DIM + eps)
            x = x * scale[:, None] * tl.load(weight + d).to(tl.float32)[None, :]
            y = y * scale[:, None] * tl.load(weight + partner).to(tl.float32)[None, :]
        cos = tl.load(rope + token * 2 * DIM + d)
        sin = tl.load(rope + token * 2 * DIM + DIM + d)
        turned = (x * cos[None, :] + y * sin[None, :]).to(q_out.dtype.element_ty)
        if first < HEADS:
            tl.store(q_out + (token * HEADS + head[:, None]) * DIM + d[None, :], turned)
        else:
            k_head = head - HEADS
            tl.store(keys + (slot * KV_HEADS + k_head[:, None]) * DIM + d[None, :], turned)
