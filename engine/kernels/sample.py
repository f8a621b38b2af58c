"""Sampling and logprobs in two launches: every piece of the vocabulary by itself, then the pieces of a row together.

One read of the logits gives the normalisers of all modes, the noise and the best id. Rows with a law of their own
(filters, penalties, bias, allowed ids) read a second table, whose logits are edited and cut. Twin:
`engine.sampling.sampler.Sampler`; the noise has its bits, sums are taken in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine import step
from engine.kernels import noise
from engine.kernels.cut import PIECE, Cuts, depths

# What the first launch says of a piece to the second: its largest logit; the sums of exp below that at T and at 1; the
# best score (with noise), and the logit and the bits of the id that has it; whether a logit is not finite.
LARGEST, SUM, RAW_SUM, SCORE, LOGIT, ID, FAULT = (tl.constexpr(part) for part in range(7))
# And of what is drawn from, where that is special: the largest, the sum at T, whether one is NaN or inf.
DRAWN_LARGEST, DRAWN_SUM, DRAWN_FAULT = (tl.constexpr(part) for part in range(7, 10))
PLAIN_PARTS, SPECIAL_PARTS = tl.constexpr(7), tl.constexpr(10)
NONFINITE, EMPTY_SUPPORT = tl.constexpr(step.NONFINITE), tl.constexpr(step.EMPTY_SUPPORT)


@dataclass(frozen=True, slots=True)
class Special:
    """What rows are drawn from when it is not their plain logits.

    logits: float32[S, V], after penalties, bias and allowed ids; the plain ones themselves where no row has any.
    cuts: of these. min_p: float32[S], 0 where off.
    """

    logits: torch.Tensor
    cuts: Cuts
    min_p: torch.Tensor


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    special: Special | None = None,
) -> torch.Tensor:
    """Sample one id a row; write it to `last_token[slots]`; return int32[5, S]: ids, flags, and the bits of the
    float32 logprobs in the order of LOGPROB_MODES (NaN where flagged).

    logits: float32[S, V]. temperature: float32[S] > 0, 1 where greedy. greedy: bool[S]. keys: int64[S, 5], noise keys
    with the position. slots: int64[S]. last_token: int64[slots]. special: None if all rows are plain.
    """
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    count = (PLAIN_PARTS if special is None else SPECIAL_PARTS).value
    parts = torch.empty(rows, count, pieces, dtype=torch.float32, device=logits.device)
    out = torch.empty(5, rows, dtype=torch.int32, device=logits.device)
    drawn = [logits, *[temperature] * 5]  # not read by a plain launch
    if special is not None:
        cuts = special.cuts
        drawn = [special.logits, cuts.tops, cuts.depth, cuts.ties, cuts.tied, special.min_p]
    sample_pieces_kernel[(pieces, rows)](
        logits,
        temperature,
        greedy,
        keys,
        *drawn,
        parts,
        vocab,
        pieces,
        SPECIAL=special is not None,
        WIDTH=triton.next_power_of_2(pieces),
        PIECE=PIECE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    sample_combine_kernel[(rows,)](
        logits,
        parts,
        temperature,
        greedy,
        slots,
        last_token,
        out,
        vocab,
        rows,
        pieces,
        SPECIAL=special is not None,
        WIDTH=triton.next_power_of_2(pieces),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def sample_pieces_kernel(
    logits,
    temperature,
    greedy,
    keys,
    edited,
    tops,
    cut,
    ties,
    tied,
    min_p,
    parts,
    vocab,
    pieces,
    SPECIAL: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):
    """parts: float32[S, PLAIN_PARTS or SPECIAL_PARTS, pieces]."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    PARTS: tl.constexpr = SPECIAL_PARTS if SPECIAL else PLAIN_PARTS
    part = parts + row * PARTS * pieces + piece
    ids = piece * PIECE + tl.arange(0, PIECE)
    live = ids < vocab
    t = tl.load(temperature + row)

    z = tl.load(logits + row * vocab + ids, mask=live, other=0.0)
    fault = tl.max(tl.where(live & ~(tl.abs(z) < float("inf")), 1.0, 0.0))  # a NaN is not below inf either
    z = tl.where(live & (tl.abs(z) < float("inf")), z, float("-inf"))
    largest = tl.max(z)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    scaled = z - largest
    raw_sum = tl.sum(tl.exp(scaled))
    total = raw_sum
    if t != 1.0:  # most rows are drawn at 1: a division and an exponential less for each id
        scaled = tl.div_rn(scaled, tl.full(z.shape, 0.0, tl.float32) + t)
        total = tl.sum(tl.exp(scaled))
    tl.store(part + LARGEST * pieces, largest)
    tl.store(part + SUM * pieces, total)
    tl.store(part + RAW_SUM * pieces, raw_sum)

    if SPECIAL:
        z = tl.load(edited + row * vocab + ids, mask=live, other=float("-inf"))
        edited_fault = tl.max(tl.where(live & ~(z < float("inf")), 1.0, 0.0))
        depth = depths(edited, row, ids, live, vocab, tl.load(tops + row), t)
        bits, end = depth.to(tl.int32, bitcast=True), tl.load(cut + row)
        here = (live & (bits == end)).to(tl.int32)
        earlier = tl.arange(0, WIDTH)
        rank = tl.cumsum(here) + tl.sum(tl.load(tied + row * pieces + earlier, mask=earlier < piece, other=0))
        kept = (bits < end) | ((bits == end) & (rank <= tl.load(ties + row)))
        kept &= (tl.exp(-depth) >= tl.load(min_p + row)) & live & (z < float("inf"))
        z = tl.where(kept, z, float("-inf"))
        highest = tl.max(z)
        scaled = tl.div_rn(z - tl.where(highest == float("-inf"), 0.0, highest), tl.full(z.shape, 0.0, tl.float32) + t)
        tl.store(part + DRAWN_LARGEST * pieces, highest)
        tl.store(part + DRAWN_SUM * pieces, tl.sum(tl.exp(scaled)))
        tl.store(part + DRAWN_FAULT * pieces, edited_fault)

    score = scaled
    if not tl.load(greedy + row):
        quad = piece * (PIECE // 4) + tl.arange(0, PIECE // 4)
        score += noise.gumbel(noise.words(keys + row * 5, quad))
    best, where = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(part + SCORE * pieces, best)
    tl.store(part + LOGIT * pieces, tl.sum(tl.where(tl.arange(0, PIECE) == where, z, 0.0)))
    tl.store(part + ID * pieces, (piece * PIECE + where).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(part + FAULT * pieces, fault)


@triton.jit(do_not_specialize=["rows"])  # else the first step of one row compiles for 0.4 s
def sample_combine_kernel(
    logits,
    parts,
    temperature,
    greedy,
    slots,
    last_token,
    out,
    vocab,
    rows,
    pieces,
    SPECIAL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    PARTS: tl.constexpr = SPECIAL_PARTS if SPECIAL else PLAIN_PARTS
    piece = tl.arange(0, WIDTH)
    live = piece < pieces
    part = parts + row * PARTS * pieces + piece
    t = tl.load(temperature + row)
    spread = tl.full((WIDTH,), 0.0, tl.float32) + t
    largest = tl.load(part + LARGEST * pieces, mask=live, other=float("-inf"))
    top = tl.max(largest)
    weights = tl.load(part + SUM * pieces, mask=live, other=0.0)
    total = tl.sum(weights * tl.exp(tl.div_rn(largest - top, spread)))
    raw_total = tl.sum(tl.load(part + RAW_SUM * pieces, mask=live, other=0.0) * tl.exp(largest - top))
    flag = tl.where(tl.max(tl.load(part + FAULT * pieces, mask=live, other=0.0)) > 0, NONFINITE, 0)

    if SPECIAL:
        largest = tl.load(part + DRAWN_LARGEST * pieces, mask=live, other=float("-inf"))
        drawn_top = tl.max(largest)
        edited_fault = tl.max(tl.load(part + DRAWN_FAULT * pieces, mask=live, other=0.0)) > 0
        flag = tl.where((flag == 0) & edited_fault, NONFINITE, flag)
        flag = tl.where((flag == 0) & (drawn_top == float("-inf")), EMPTY_SUPPORT, flag)
        drawn_top = tl.where(drawn_top == float("-inf"), 0.0, drawn_top)
        weights = tl.load(part + DRAWN_SUM * pieces, mask=live, other=0.0)
    else:
        drawn_top = top
    shift = tl.div_rn(largest - drawn_top, spread)
    drawn_total = tl.sum(weights * tl.exp(shift))
    scores = tl.load(part + SCORE * pieces, mask=live, other=float("-inf"))
    best = tl.argmax(scores + shift, axis=0, tie_break_left=True)

    first = parts + row * PARTS * pieces + best
    token = tl.where(flag > 0, 0, tl.load(first + ID * pieces).to(tl.int32, bitcast=True))
    drawn_z = tl.load(first + LOGIT * pieces) - drawn_top
    z = drawn_z
    if SPECIAL:
        z = tl.load(logits + row * vocab + token) - top
    at_temperature = tl.div_rn(z, t) - tl.log(total)
    processed = tl.div_rn(drawn_z, t) - tl.log(drawn_total)
    processed = tl.where(tl.load(greedy + row), at_temperature, processed)
    raw = z - tl.log(raw_total)
    tl.store(last_token + tl.load(slots + row), token.to(tl.int64))
    tl.store(out + row, token)
    tl.store(out + rows + row, flag)
    nan = float("nan")
    tl.store(out + 2 * rows + row, tl.where(flag > 0, nan, processed).to(tl.int32, bitcast=True))
    tl.store(out + 3 * rows + row, tl.where(flag > 0, nan, at_temperature).to(tl.int32, bitcast=True))
    tl.store(out + 4 * rows + row, tl.where(flag > 0, nan, raw).to(tl.int32, bitcast=True))
