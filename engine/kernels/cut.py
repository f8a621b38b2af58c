"""Where the filters of a row cut, found by counting instead of sorting.

How far an id is below the likeliest, (top - z) / T, is its depth; as a float32 that is never negative it is ordered
like the integer of its bits. The depth of the last id that stays is settled four bits a pass, from the highest:
every program adds up what of its piece of the vocabulary is no deeper than each of 16 pivots (ids for top-k, their
weights for top-p), and the next pass begins with the sums over all pieces. There are no atomics: all sums are taken in
one order, so a row's cut depends on nothing but the row. A count that is met exactly ends the search, and
a piece without ids between two pivots is not read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 2048
"""Ids a program. In a pass it is one warp: every thread then holds its ids for all pivots."""
STEP = tl.constexpr(128)
PIVOTS = tl.constexpr(16)
FIRST = tl.constexpr(27)
INFINITE = tl.constexpr(0x7F800000)
SHIFTS = (27, 23, 19, 15, 11, 7, 3, 0)
"""Bits below those that a pass settles: 31 in all, for the sign is 0."""
ALL = 2**31 - 1
"""A depth that no id is below, and more ties than there are ids."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """What stays of each row: depths below `depth`, and of those at it the `ties` ids that come first.

    tops: float32[S], the largest logit, 0 where it is not finite. depth: int32[S], the bits of a float32.
    ties: int32[S]. tied: int32[S, pieces], ids at `depth` in each `PIECE` of the vocabulary.
    """

    tops: Tensor
    depth: Tensor
    ties: Tensor
    tied: Tensor


def find_cuts(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, *, any_k: bool, any_p: bool) -> Cuts:
    """Cuts of top-k, and of top-p in what that leaves, as in `engine.sampling.law`.

    logits: float32[S, V]. temperature: float32[S] > 0. top_k: float64[S], 0 where off. top_p: float64[S] in (0, 1], 1
    where off. any_k, any_p: whether there is a row where they are on.
    """
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    tops = logits.amax(-1)
    tops = torch.where(tops.isfinite(), tops, 0.0)
    depth = torch.full((rows,), ALL, dtype=torch.int32, device=logits.device)
    ties = torch.full((rows,), ALL, dtype=torch.int32, device=logits.device)
    tied = torch.zeros(rows, pieces, dtype=torch.int32, device=logits.device)
    totals = torch.ones(rows, dtype=torch.float64, device=logits.device)
    row = (logits, tops, temperature)
    if any_k:
        depth, _ = _search(*row, top_k, depth, totals, weights=False)
    if any_p:
        share = torch.where(top_p < 1, top_p, 0.0)
        depth, totals = _search(*row, share, depth, totals, weights=True)
        below = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
        grid, width = (pieces, rows), triton.next_power_of_2(pieces)
        ties_kernel[grid](*row, share, depth, tied, below, vocab, pieces, PIECE=PIECE, num_warps=4)
        ties_wanted_kernel[(rows,)](share, totals, depth, below, ties, pieces, WIDTH=width, num_warps=1)
    return Cuts(tops, depth, ties, tied)


def _search(
    logits: Tensor, tops: Tensor, temperature: Tensor, wanted: Tensor, limit: Tensor, totals: Tensor, *, weights: bool
) -> tuple[Tensor, Tensor]:
    """int32[S], a depth: down to it there are exactly `wanted` ids, or else it is the smallest down to which there are
    more, or down to which there is that share of the weight of what is no deeper than `limit`; `limit` where `wanted`
    is 0. And float64[S], that weight: `totals` where ids are counted."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    width = triton.next_power_of_2(pieces)
    parts = torch.empty(2, rows, pieces, PIVOTS.value, dtype=torch.float32, device=logits.device)
    lows = torch.zeros(2, rows, dtype=torch.int32, device=logits.device)
    bases = torch.zeros(rows, pieces, dtype=torch.float32, device=logits.device)
    met = torch.full((rows,), -1, dtype=torch.int32, device=logits.device)
    totals = totals.clone()
    for turn, shift in enumerate(SHIFTS):
        here, there = turn % 2, 1 - turn % 2
        weigh_kernel[(pieces, rows)](
            logits,
            tops,
            temperature,
            wanted,
            limit,
            lows[there],
            lows[here],
            parts[there],
            parts[here],
            bases,
            totals,
            met,
            vocab,
            pieces,
            shift,
            SHIFTS[turn - 1] if turn else -1,
            WEIGHTS=weights,
            WIDTH=width,
            PIECE=PIECE,
            num_warps=1,
        )
    last = (len(SHIFTS) - 1) % 2
    depth = torch.empty_like(limit)
    settle_kernel[(rows,)](
        wanted, limit, lows[last], parts[last], totals, met, depth, pieces, SHIFTS[-1], WEIGHTS=weights, WIDTH=width
    )
    return depth, totals


@triton.jit
def depths(logits, row, ids, live, vocab, top, t):
    """(top - z) / T, rounded as `law.scale` rounds; beyond the vocabulary the deepest."""
    z = tl.load(logits + row * vocab + ids, mask=live, other=float("-inf"))
    return tl.div_rn(top - z, tl.full(z.shape, 0.0, tl.float32) + t)


@triton.jit
def _settle(low, part, total, want, pieces, shift, WEIGHTS: tl.constexpr, WIDTH: tl.constexpr):
    """How many of the 16 pivots lie above the cut; the weight of all ids, which the first pass knows; and, if so many
    ids are wanted as are above a pivot, that pivot, else -1."""
    piece, pivot = tl.arange(0, WIDTH), tl.arange(0, PIVOTS)
    place = piece[:, None] * PIVOTS + pivot[None, :]
    sums = tl.sum(tl.load(part + place, mask=piece[:, None] < pieces, other=0.0).to(tl.float64), 0)
    if WEIGHTS:
        if shift == FIRST:
            total = tl.sum(tl.where(pivot == PIVOTS - 1, sums, 0.0))
        want *= total
    short = tl.minimum(tl.sum((sums < want).to(tl.int32)), PIVOTS - 1)
    met = tl.where(tl.max(tl.where(sums == want, 1, 0)) > 0, low + (short << shift) + (1 << shift) - 1, -1)
    return short, total, met


@triton.jit(do_not_specialize=["shift", "settled"])
def weigh_kernel(
    logits,
    tops,
    temperature,
    wanted,
    limits,
    lows_in,
    lows_out,
    parts_in,
    parts_out,
    bases,
    totals,
    met,
    vocab,
    pieces,
    shift,
    settled,
    WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    want, found = tl.load(wanted + row), tl.load(met + row)
    if (want > 0) & (found < 0):
        low, total = tl.load(lows_in + row), tl.load(totals + row)
        own = (row * pieces + piece) * PIVOTS
        pivot = tl.arange(0, PIVOTS)
        empty, base = False, 0.0
        if settled >= 0:
            short, total, found = _settle(
                low, parts_in + row * pieces * PIVOTS, total, want, pieces, settled, WEIGHTS=WEIGHTS, WIDTH=WIDTH
            )
            low += short << settled
            if WEIGHTS:
                found = -1
            # The other programs of this launch come to the same, whether they read these before or after.
            if piece == 0:
                tl.store(lows_out + row, low)
                tl.store(met + row, found)
                if settled == FIRST:
                    tl.store(totals + row, total)
            base = tl.load(bases + row * pieces + piece)
            if short > 0:
                base = tl.load(parts_in + own + short - 1)
            tl.store(bases + row * pieces + piece, base)
            empty = tl.load(parts_in + own + short) == base
        if (found < 0) & empty:
            tl.store(parts_out + own + pivot, tl.zeros((PIVOTS,), tl.float32) + base)
        elif found < 0:
            pivots = tl.minimum(low + (pivot << shift) + ((1 << shift) - 1), INFINITE).to(tl.float32, bitcast=True)
            top, t, limit = tl.load(tops + row), tl.load(temperature + row), tl.load(limits + row)
            sums = tl.zeros((PIVOTS, STEP), tl.float32)
            for start in range(0, tl.minimum(vocab - piece * PIECE, PIECE), STEP):
                ids = piece * PIECE + start + tl.arange(0, STEP)
                live = ids < vocab
                depth = depths(logits, row, ids, live, vocab, top, t)
                within = live & (depth.to(tl.int32, bitcast=True) <= limit)
                weight = tl.where(within, tl.exp(-depth), 0.0) if WEIGHTS else live.to(tl.float32)
                sums += tl.where(depth[None, :] <= pivots[:, None], weight[None, :], 0.0)
            tl.store(parts_out + own + pivot, tl.sum(sums, 1))


@triton.jit(do_not_specialize=["shift"])
def settle_kernel(
    wanted, limits, lows, parts, totals, met, out, pieces, shift, WEIGHTS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    want, found, depth = tl.load(wanted + row), tl.load(met + row), tl.load(limits + row)
    if found >= 0:
        depth = found
    elif want > 0:
        part = parts + row * pieces * PIVOTS
        low, total = tl.load(lows + row), tl.load(totals + row)
        short, _, _ = _settle(low, part, total, want, pieces, shift, WEIGHTS=WEIGHTS, WIDTH=WIDTH)
        depth = low + (short << shift)
    tl.store(out + row, depth)


@triton.jit
def ties_kernel(logits, tops, temperature, share, cut, tied, below, vocab, pieces, PIECE: tl.constexpr):
    """Of each piece: the ids at the cut, and the weight of those above it."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(share + row) > 0:
        ids = piece * PIECE + tl.arange(0, PIECE)
        live = ids < vocab
        depth = depths(logits, row, ids, live, vocab, tl.load(tops + row), tl.load(temperature + row))
        bits, end = depth.to(tl.int32, bitcast=True), tl.load(cut + row)
        tl.store(tied + row * pieces + piece, tl.sum((live & (bits == end)).to(tl.int32)))
        tl.store(below + row * pieces + piece, tl.sum(tl.where(live & (bits < end), tl.exp(-depth), 0.0)))


@triton.jit
def ties_wanted_kernel(share, totals, cut, below, ties, pieces, WIDTH: tl.constexpr):
    """How many ids at the cut it takes to reach the share, given what is above it."""
    row = tl.program_id(0).to(tl.int64)
    want = tl.load(share + row)
    if want > 0:
        piece = tl.arange(0, WIDTH)
        above = tl.sum(tl.load(below + row * pieces + piece, mask=piece < pieces, other=0.0).to(tl.float64))
        each = tl.exp(-tl.load(cut + row).to(tl.float32, bitcast=True)).to(tl.float64)
        missing = tl.ceil((want * tl.load(totals + row) - above) / each)
        tl.store(ties + row, tl.minimum(tl.maximum(missing, 1.0), 2147483647.0).to(tl.int32))
