"""One row times W, on the CUDA cores: W passes once, straight from memory into registers.

A program takes a few rows of W and all of K. It asks for its first pieces of W before it waits for the launch that
makes x (programmatic dependent launch), so that reading W goes on through the end of that launch and the gap after it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.skinny_parts import finish, load_squares, weight_rows


@triton.jit(do_not_specialize=["parts"])
def vector_kernel(
    x,
    x_squares,
    weight,
    bias,
    gain,
    out,
    scaled,
    squares,
    eps,
    parts,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RING: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """x: [K]. weight: [N, K], or [2 * N, K] if GATED. out: [N]. RING: pieces [BN, BK] of W under way at a time. The
    rest as in `finish` and `load_squares`. OVERLAP: the launch is a dependent one."""
    if OVERLAP:
        gdc_launch_dependents()
    steps: tl.constexpr = (K + BK - 1) // BK
    k = tl.arange(0, BK)
    row = weight_rows(tl.program_id(0), N, BN, GATED)
    places = weight + row.to(tl.int64)[:, None] * K + k[None, :]
    ring = ()
    for step in tl.static_range(RING):
        ring += (_piece(places, k[None, :], step, K, BK, "evict_first"),)  # type: ignore[assignment]
    if OVERLAP:
        gdc_wait()
    x_sums = 0.0
    if SCALED:
        x_sums = load_squares(x_squares, 1, parts, 1, PARTS)
    # Eight neighbours, which one thread holds, are summed at once: an eighth of the accumulators.
    acc = tl.zeros([BN, BK // 8], tl.float32)
    for step in tl.static_range(steps):
        w = ring[0].to(tl.float32)  # type: ignore[misc]
        ring = ring[1:]
        if step + RING < steps:
            ring += (_piece(places, k[None, :], step + RING, K, BK, "evict_first"),)  # type: ignore[assignment]
        v = _piece(x + k, k, step, K, BK, "").to(tl.float32)
        acc += tl.sum(tl.reshape(w * v[None, :], [BN, BK // 8, 8]), axis=2)
    y = tl.sum(acc, axis=1)[:, None]
    finish(y, x_sums, bias, gain, out, scaled, squares, eps, 1, N, K, BN, 1, SCALED, BIAS, GATED, ADD, NORM)


@triton.jit
def _piece(places, k, step: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, POLICY: tl.constexpr):
    if (step + 1) * BK <= K:
        piece = tl.load(places + step * BK, eviction_policy=POLICY)
    else:
        piece = tl.load(places + step * BK, mask=k + step * BK < K, other=0.0, eviction_policy=POLICY)
    return piece
