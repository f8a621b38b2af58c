"""Decode attention over the paged KV pool: one query token a row, tiles of even length, one launch a layer.

Flash-decoding (Dao et al., 2023) over the tiles of `engine.attention.split.cut`. A row of one tile writes its output
directly; the tiles of a longer row write partial results, and the last of them to finish puts these together, found
by a counter that it leaves at zero again. So there is no second launch and nothing to plan on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.overlap import between_linears

TOKENS, WARPS, STAGES = 64, 4, 3
"""KV tokens read at a time, warps of a program, and reads in flight."""

MERGE = 8
"""Partial results put together at a time."""


class DecodeScratch:
    """Partial results of up to `tiles` tiles, shared by all layers and graphs (they run one after the other)."""

    def __init__(self, tiles: int, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> None:
        self.out = torch.empty(tiles, heads, dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(tiles, heads, 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows, kv_heads, dtype=torch.int32, device=device)


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_starts: torch.Tensor,
    tile_stops: torch.Tensor,
    first_tiles: torch.Tensor,
    tile_counts: torch.Tensor,
    block_indptr: torch.Tensor,
    block_ids: torch.Tensor,
    scratch: DecodeScratch,
    out: torch.Tensor,
) -> None:
    """q: [R, heads, dim] -> out, alike. keys, values: [blocks, 16, kv_heads, dim]. Rows without a tile stay unwritten.

    tile_rows, tile_starts, tile_stops: int32[tiles]; first_tiles, tile_counts: int32[R] (`Tiles`).
    block_indptr: int32[R + 1] and block_ids: int32[N], the rows' KV blocks. dim must be a power of two.
    """
    heads, dim = q.shape[1:]
    block, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    overlap = between_linears(len(q), q.device)
    _kernel[(kv_heads, len(tile_rows))](
        q,
        keys,
        values,
        tile_rows,
        tile_starts,
        tile_stops,
        first_tiles,
        tile_counts,
        block_indptr,
        block_ids,
        scratch.out,
        scratch.stats,
        scratch.arrived,
        out,
        dim**-0.5 * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        MEMBERS=triton.next_power_of_2(group),
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        PAGE=block,
        TOKENS=TOKENS,
        MERGE=MERGE,
        OVERLAP=overlap,
        num_warps=WARPS,
        num_stages=STAGES,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit
def _kernel(
    q,
    keys,
    values,
    tile_rows,
    tile_starts,
    tile_stops,
    first_tiles,
    tile_counts,
    block_indptr,
    block_ids,
    part_out,
    part_stats,
    arrived,
    out,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    MERGE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows + tile)
    start = tl.load(tile_starts + tile)
    stop = tl.load(tile_stops + tile)
    first = tl.load(first_tiles + row)
    tiles = tl.load(tile_counts + row)
    blocks = block_ids + tl.load(block_indptr + row)
    if OVERLAP:  # the tables above were there before the step
        gdc_wait()
        gdc_launch_dependents()
    if start == stop:
        return

    # The GROUP query heads of one KV head are the rows of a small matrix product, padded to a tensor core's 16.
    member = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    head = kv_head * GROUP + member
    real = member < GROUP
    query = tl.load(q + (row.to(tl.int64) * HEADS + head[:, None]) * DIM + d[None, :], mask=real[:, None], other=0.0)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for begin in range(start, stop, TOKENS):
        position = begin + tl.arange(0, TOKENS)
        live = position < stop
        page = tl.load(blocks + position // PAGE, mask=live, other=0).to(tl.int64)
        place = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head) * DIM
        k = tl.load(keys + place[:, None] + d[None, :], mask=live[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k)) * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - above[:, None])
        shrink = tl.exp2(largest - above)
        v = tl.load(values + place[:, None] + d[None, :], mask=live[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, axis=1)
        largest = above

    target = out + (row.to(tl.int64) * HEADS + head[:, None]) * DIM + d[None, :]
    if tiles == 1:
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
        return

    part = tile * HEADS + head
    tl.store(part_out + part[:, None] * DIM + d[None, :], acc, mask=real[:, None])
    tl.store(part_stats + part * 2, largest, mask=real)
    tl.store(part_stats + part * 2 + 1, total, mask=real)
    tl.debug_barrier()  # every thread's stores come before the one thread's count
    counter = arrived + row * KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < tiles - 1:
        return

    tl.store(counter, 0)
    _merge(part_out, part_stats, out, row, kv_head, first, tiles, HEADS, GROUP, MEMBERS, DIM, MERGE)


@triton.jit
def _merge(
    part_out,
    part_stats,
    out,
    row,
    kv_head,
    first,
    tiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Put a row's partial results together, in tile order, so that the result does not depend on who was last. The
    maximum comes first: the reads of the partial outputs then wait for nothing, and MERGE of them are under way."""
    d = tl.arange(0, DIM)
    member = tl.arange(0, MEMBERS)
    real = member < GROUP
    head = kv_head * GROUP + member
    last = first + tiles
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    for begin in range(first, last, MERGE):
        for i in tl.static_range(MERGE):
            tile = member * 0 + begin + i
            stats = part_stats + (tile * HEADS + head) * 2
            top = tl.maximum(top, tl.load(stats, mask=real & (tile < last), other=float("-inf")))
    top = tl.where(real, top, 0.0)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, DIM], tl.float32)
    for begin in range(first, last, MERGE):
        for i in tl.static_range(MERGE):
            tile = member * 0 + begin + i
            live = real & (tile < last)
            part = tile * HEADS + head
            weight = tl.exp2(tl.load(part_stats + part * 2, mask=live, other=float("-inf")) - top)
            total += tl.load(part_stats + part * 2 + 1, mask=live, other=0.0) * weight
            some = tl.load(part_out + part[:, None] * DIM + d[None, :], mask=live[:, None], other=0.0)
            acc += some * weight[:, None]
    total = tl.where(real, total, 1.0)
    target = out + (row.to(tl.int64) * HEADS + head[:, None]) * DIM + d[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
