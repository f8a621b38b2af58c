"""Partial results of decode attention: left by the tiles of a row, put together by whoever comes last.

A place of partial results is a tile and one of its MEMBERS (1 where no tile is shared): fp32[DIM] for each head, the
largest score, and the sum of weights relative to it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def leave(part_out, part_stats, part, real, largest, total, acc, DIM: tl.constexpr):
    """Write partial results for whoever will merge them."""
    d = tl.arange(0, DIM)
    tl.store(part_out + part[:, None] * DIM + d[None, :], acc, mask=real[:, None])
    tl.store(part_stats + part * 2, largest, mask=real)
    tl.store(part_stats + part * 2 + 1, total, mask=real)
    tl.debug_barrier()  # every thread's stores come before the one thread's count


@triton.jit
def arrive(counter, expected):
    """Is this the last of `expected` arrivals? Then the counter is zero again."""
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merge(
    part_out,
    part_stats,
    out,
    first_tiles,
    tile_counts,
    num_rows,
    row,
    seat,
    kv_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    MERGE: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Put a row's partial results together, its own tiles first, then its run's, in tile order: the result does not
    depend on who was last. The maximum comes first: the reads of the partial outputs then wait for nothing, and MERGE
    of them are under way."""
    d = tl.arange(0, DIM)
    place = tl.arange(0, HEAD_ROWS)
    real = place < GROUP
    head = kv_head * GROUP + place
    first = tl.load(first_tiles + row)
    tiles = tl.load(tile_counts + row)
    top = tl.full([HEAD_ROWS], float("-inf"), tl.float32)
    top = _highest(part_stats, top, first, tiles, 0, head, real, HEADS, MERGE, MEMBERS)
    shared, shared_tiles = 0, 0
    if MEMBERS > 1:
        if seat >= 0:
            shared = tl.load(first_tiles + num_rows + seat // MEMBERS)
            shared_tiles = tl.load(tile_counts + num_rows + seat // MEMBERS)
        top = _highest(part_stats, top, shared, shared_tiles, seat % MEMBERS, head, real, HEADS, MERGE, MEMBERS)
    top = tl.where(real, top, 0.0)
    total = tl.zeros([HEAD_ROWS], tl.float32)
    acc = tl.zeros([HEAD_ROWS, DIM], tl.float32)
    total, acc = _sum(part_out, part_stats, top, total, acc, first, tiles, 0, head, real, HEADS, DIM, MERGE, MEMBERS)
    if MEMBERS > 1:
        total, acc = _sum(
            part_out, part_stats, top, total, acc, shared, shared_tiles, seat % MEMBERS, head, real,
            HEADS, DIM, MERGE, MEMBERS,
        )  # fmt: skip
    total = tl.where(real, total, 1.0)
    target = out + (row.to(tl.int64) * HEADS + head[:, None]) * DIM + d[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _highest(
    part_stats,
    top,
    first,
    tiles,
    member,
    head,
    real,
    HEADS: tl.constexpr,
    MERGE: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    for begin in range(first, first + tiles, MERGE):
        for i in tl.static_range(MERGE):
            tile = head * 0 + begin + i
            stats = part_stats + ((tile * MEMBERS + member) * HEADS + head) * 2
            top = tl.maximum(top, tl.load(stats, mask=real & (tile < first + tiles), other=float("-inf")))
    return top


@triton.jit
def _sum(
    part_out,
    part_stats,
    top,
    total,
    acc,
    first,
    tiles,
    member,
    head,
    real,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    MERGE: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    d = tl.arange(0, DIM)
    for begin in range(first, first + tiles, MERGE):
        for i in tl.static_range(MERGE):
            tile = head * 0 + begin + i
            live = real & (tile < first + tiles)
            part = (tile * MEMBERS + member) * HEADS + head
            weight = tl.exp2(tl.load(part_stats + part * 2, mask=live, other=float("-inf")) - top)
            total += tl.load(part_stats + part * 2 + 1, mask=live, other=0.0) * weight
            some = tl.load(part_out + part[:, None] * DIM + d[None, :], mask=live[:, None], other=0.0)
            acc += some * weight[:, None]
    return total, acc
