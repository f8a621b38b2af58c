"""Sampling and logprobs of plain rows (no filter, penalty, bias, allowed ids or alternatives) in two launches.

The logits are read once: each program takes one piece of a row and keeps its maximum, its two sums of exponentials
(at the row's temperature and at 1) and its best noisy score; a second, small launch puts the pieces together and
writes the token where the next step reads it. Twin: the plain path of `Sampler.sample`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import noise

BLOCK = 2048
"""Ids of one program: 75 programs a row for a vocabulary of 151,936, so that even one row spreads over the GPU."""


def sample_plain(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
) -> torch.Tensor:
    """Sample one id a row; write it to `last_token[slots]`; return int32[5, S]: ids, flags, and the bits of the
    float32 logprobs in the order of LOGPROB_MODES (NaN where flagged).

    logits: float32[S, V]. temperature: float32[S] > 0, 1 where greedy. greedy: bool[S]. keys: int64[S, 5], noise keys
    with the position. slots: int64[S]. last_token: int64[slots].
    """
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, BLOCK)
    parts = torch.empty(rows, 7, pieces, dtype=torch.float32, device=logits.device)
    out = torch.empty(5, rows, dtype=torch.int32, device=logits.device)
    sample_pieces_kernel[(pieces, rows)](
        logits, temperature, greedy, keys, parts, vocab, pieces, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )
    width = triton.next_power_of_2(pieces)
    sample_combine_kernel[(rows,)](
        parts, temperature, slots, last_token, out, rows, pieces, WIDTH=width, num_warps=1, enable_fp_fusion=False
    )
    return out


@triton.jit
def sample_pieces_kernel(logits, temperature, greedy, keys, parts, vocab, pieces, BLOCK: tl.constexpr):
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = piece * BLOCK + tl.arange(0, BLOCK)
    live = ids < vocab
    z = tl.load(logits + row * vocab + ids, mask=live, other=0.0)
    fault = tl.max(tl.where(live & ~(tl.abs(z) < float("inf")), 1.0, 0.0))  # a NaN is not below inf either
    z = tl.where(live & (tl.abs(z) < float("inf")), z, float("-inf"))
    largest = tl.max(z)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    t = tl.load(temperature + row)
    scaled = tl.div_rn(z - largest, tl.full(z.shape, 0.0, tl.float32) + t)

    score = scaled
    if not tl.load(greedy + row):
        quad = piece * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        score += noise.gumbel(noise.words(keys + row * 5, quad))
    best, where = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    chosen = tl.sum(tl.where(tl.arange(0, BLOCK) == where, z, 0.0))

    part = parts + row * 7 * pieces + piece
    tl.store(part, largest)
    tl.store(part + pieces, tl.sum(tl.exp(scaled)))
    tl.store(part + 2 * pieces, tl.sum(tl.exp(z - largest)))
    tl.store(part + 3 * pieces, best)
    tl.store(part + 4 * pieces, chosen)
    tl.store(part + 5 * pieces, (piece * BLOCK + where).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(part + 6 * pieces, fault)


@triton.jit
def sample_combine_kernel(parts, temperature, slots, last_token, out, rows, pieces, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, WIDTH)
    live = piece < pieces
    part = parts + row * 7 * pieces + piece
    largest = tl.load(part, mask=live, other=float("-inf"))
    top = tl.max(largest)
    t = tl.load(temperature + row)
    shift = tl.div_rn(largest - top, tl.full(largest.shape, 0.0, tl.float32) + t)
    total = tl.sum(tl.load(part + pieces, mask=live, other=0.0) * tl.exp(shift))
    raw_total = tl.sum(tl.load(part + 2 * pieces, mask=live, other=0.0) * tl.exp(largest - top))
    score = tl.load(part + 3 * pieces, mask=live, other=float("-inf")) + shift
    best = tl.argmax(score, axis=0, tie_break_left=True)
    fault = tl.max(tl.load(part + 6 * pieces, mask=live, other=0.0)) > 0

    first = parts + row * 7 * pieces + best
    z = tl.load(first + 4 * pieces) - top
    token = tl.where(fault, 0, tl.load(first + 5 * pieces).to(tl.int32, bitcast=True))
    at_temperature = tl.where(fault, float("nan"), tl.div_rn(z, t) - tl.log(total))
    raw = tl.where(fault, float("nan"), z - tl.log(raw_total))
    tl.store(last_token + tl.load(slots + row), token.to(tl.int64))
    tl.store(out + row, token)
    tl.store(out + rows + row, fault.to(tl.int32))
    tl.store(out + 2 * rows + row, at_temperature.to(tl.int32, bitcast=True))
    tl.store(out + 3 * rows + row, at_temperature.to(tl.int32, bitcast=True))
    tl.store(out + 4 * rows + row, raw.to(tl.int32, bitcast=True))
