"""Decode attention over the paged KV pool: one query token a row, tiles of even length, one launch a layer.

Flash-decoding (Dao et al., 2023) over the tiles of `engine.attention.split.cut`. A row of one tile writes its output
directly; the tiles of a longer row write partial results, and the last of them to finish puts these together, found
by a counter that it leaves at zero again. So there is no second launch and nothing to plan on the device.

Rows that share a prefix (`engine.attention.shared.Runs`) are read together there, as Hydragen does it (Juravsky et al.,
2024), but in the same launch: the queries of all members multiply one read of the prefix, which leaves a partial result
for each of them. To a row, all tiles of its run count as one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.shared import MEMBERS
from engine.attention.split import most_runs
from engine.attention.tables import Tables
from engine.kernels.decode_merge import arrive, leave, merge
from engine.kernels.overlap import between_linears

TOKENS, WARPS = 64, 4
"""KV tokens read at a time, and warps of a program."""

STAGES, STAGES_WITH_RUNS = 3, 2
"""Reads in flight. With runs a program needs more registers; a third read would cost one of four programs on each
multiprocessor."""

MERGE = 8
"""Partial results put together at a time."""


class DecodeScratch:
    """Partial results of up to `tiles` tiles, shared by all layers and graphs (they run one after the other).

    out: fp32[places, heads, dim], stats: fp32[places, heads, 2], with MEMBERS places a tile, or one where so few rows
    have no runs. arrived: int32[rows + runs, kv_heads], tiles that are done; zero between launches.
    """

    def __init__(self, tiles: int, rows: int, heads: int, kv_heads: int, dim: int, device: torch.device) -> None:
        runs = most_runs(rows)
        places = tiles * (MEMBERS if runs else 1)
        self.out = torch.empty(places, heads, dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(places, heads, 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(rows + runs, kv_heads, dtype=torch.int32, device=device)


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables[torch.Tensor],
    block_ids: torch.Tensor,
    scratch: DecodeScratch,
    out: torch.Tensor,
) -> None:
    """q: [R, heads, dim] -> out, alike. keys, values: [blocks, 16, kv_heads, dim]. Rows without a tile stay unwritten.

    tables: without runs where it has no members; its streams are not used here. block_ids: int32[N], the rows' KV
    blocks. dim must be a power of two.
    """
    heads, dim = q.shape[1:]
    block, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    head_rows = triton.next_power_of_2(group)
    overlap = between_linears(len(q), q.device)
    decode_kernel[(kv_heads, len(tables.tile_owners))](
        q,
        keys,
        values,
        tables.tile_owners,
        tables.tile_blocks,
        tables.tile_tokens,
        tables.first_tiles,
        tables.tile_counts,
        tables.seats,
        tables.members,
        block_ids,
        scratch.out,
        scratch.stats,
        scratch.arrived,
        out,
        len(q),
        dim**-0.5 * 1.4426950408889634,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_ROWS=head_rows,
        ROWS=max(16, head_rows),  # no fewer make a matrix product
        RUN_ROWS=max(16, MEMBERS * head_rows),
        DIM=dim,
        PAGE=block,
        TOKENS=TOKENS,
        MERGE=MERGE,
        MEMBERS=MEMBERS if len(tables.members) else 1,
        OVERLAP=overlap,
        num_warps=WARPS,
        num_stages=STAGES_WITH_RUNS if len(tables.members) else STAGES,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit(do_not_specialize=["num_rows"])
def decode_kernel(
    q,
    keys,
    values,
    tile_owners,
    tile_blocks,
    tile_tokens,
    first_tiles,
    tile_counts,
    seats,
    members,
    block_ids,
    part_out,
    part_stats,
    arrived,
    out,
    num_rows,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    RUN_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    MERGE: tl.constexpr,
    MEMBERS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """MEMBERS: places of a tile's partial results; 1 where there are no runs."""
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    owner = tl.load(tile_owners + tile)
    blocks = block_ids + tl.load(tile_blocks + tile)
    tokens = tl.load(tile_tokens + tile)
    if OVERLAP:  # the tables above were there before the step
        gdc_wait()
        gdc_launch_dependents()
    if tokens == 0:
        return

    if MEMBERS == 1:
        _row_tile(
            q, keys, values, first_tiles, tile_counts, seats, part_out, part_stats, arrived,
            out, num_rows, scale, kv_head, tile, owner, blocks, tokens,
            HEADS, KV_HEADS, GROUP, HEAD_ROWS, ROWS, DIM, PAGE, TOKENS, MERGE, MEMBERS,
        )  # fmt: skip
    elif owner < num_rows:
        _row_tile(
            q, keys, values, first_tiles, tile_counts, seats, part_out, part_stats, arrived,
            out, num_rows, scale, kv_head, tile, owner, blocks, tokens,
            HEADS, KV_HEADS, GROUP, HEAD_ROWS, ROWS, DIM, PAGE, TOKENS, MERGE, MEMBERS,
        )  # fmt: skip
    else:
        _run_tile(
            q, keys, values, first_tiles, tile_counts, members, part_out, part_stats, arrived,
            out, num_rows, scale, kv_head, tile, owner, blocks, tokens,
            HEADS, KV_HEADS, GROUP, HEAD_ROWS, RUN_ROWS, DIM, PAGE, TOKENS, MERGE, MEMBERS,
        )  # fmt: skip


@triton.jit
def _row_tile(
    q,
    keys,
    values,
    first_tiles,
    tile_counts,
    seats,
    part_out,
    part_stats,
    arrived,
    out,
    num_rows,
    scale,
    kv_head,
    tile,
    owner,
    blocks,
    tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    MERGE: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Tokens of one row: the GROUP query heads of a KV head are the rows of a small matrix product, padded to a tensor
    core's 16."""
    d = tl.arange(0, DIM)
    place = tl.arange(0, ROWS)
    real = place < GROUP
    row = owner.to(tl.int64)
    head = kv_head * GROUP + place
    query = tl.load(q + (row * HEADS + head[:, None]) * DIM + d[None, :], mask=real[:, None], other=0.0)
    tiles = tl.load(tile_counts + owner)
    seat = -1
    if MEMBERS > 1:
        seat = tl.load(seats + owner)
    largest, total, acc = _read(query, keys, values, blocks, tokens, kv_head, scale, KV_HEADS, DIM, PAGE, TOKENS)
    if tiles == 1 and seat < 0:
        target = out + (row * HEADS + head[:, None]) * DIM + d[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    else:
        part = tile * MEMBERS * HEADS + head
        leave(part_out, part_stats, part, real, largest, total, acc, DIM)
        if arrive(arrived + owner * KV_HEADS + kv_head, tiles + tl.where(seat < 0, 0, 1)):
            merge(
                part_out, part_stats, out, first_tiles, tile_counts, num_rows, owner, seat, kv_head,
                HEADS, GROUP, HEAD_ROWS, DIM, MERGE, MEMBERS,
            )  # fmt: skip


@triton.jit
def _run_tile(
    q,
    keys,
    values,
    first_tiles,
    tile_counts,
    members,
    part_out,
    part_stats,
    arrived,
    out,
    num_rows,
    scale,
    kv_head,
    tile,
    owner,
    blocks,
    tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    RUN_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    MERGE: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Tokens that the members of a run share: the query heads of all of them are the rows of one matrix product."""
    run = owner - num_rows
    d = tl.arange(0, DIM)
    place = tl.arange(0, RUN_ROWS)
    member, inner = place // HEAD_ROWS, place % HEAD_ROWS
    row = tl.load(members + run * MEMBERS + member, mask=member < MEMBERS, other=-1).to(tl.int64)
    real = (row >= 0) & (inner < GROUP)
    head = kv_head * GROUP + inner
    query = tl.load(q + (row * HEADS + head)[:, None] * DIM + d[None, :], mask=real[:, None], other=0.0)
    largest, total, acc = _read(query, keys, values, blocks, tokens, kv_head, scale, KV_HEADS, DIM, PAGE, TOKENS)
    part = (tile * MEMBERS + member) * HEADS + head
    leave(part_out, part_stats, part, real, largest, total, acc, DIM)
    if arrive(arrived + owner * KV_HEADS + kv_head, tl.load(tile_counts + owner)):
        for m in range(MEMBERS):
            waiting = tl.load(members + run * MEMBERS + m)
            if waiting >= 0:
                if arrive(arrived + waiting * KV_HEADS + kv_head, tl.load(tile_counts + waiting) + 1):
                    merge(
                        part_out, part_stats, out, first_tiles, tile_counts, num_rows, waiting, run * MEMBERS + m,
                        kv_head, HEADS, GROUP, HEAD_ROWS, DIM, MERGE, MEMBERS,
                    )  # fmt: skip


@triton.jit
def _read(
    query,
    keys,
    values,
    blocks,
    tokens,
    kv_head,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Softmax attention of query [rows, DIM] over the first `tokens` of a block table: the largest score, the sum
    of weights relative to it, and the weighted values, not yet divided."""
    d = tl.arange(0, DIM)
    largest = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    acc = tl.zeros([query.shape[0], DIM], tl.float32)
    for begin in range(0, tokens, TOKENS):
        position = begin + tl.arange(0, TOKENS)
        live = position < tokens
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
    return largest, total, acc
