"""Two rows and more times W, on the tensor cores: W passes once, through shared memory, several tiles under way.

W takes the side of the product that a tensor core makes 16 wide, the rows of x the side of 8. Where W has many
rows, a program takes 64 of them and walks over all of K. Where it has few, a program takes 16, and its warps walk over
parts of K side by side: enough programs without a merge through memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.skinny_parts import finish, load_squares, weight_rows


@triton.jit(do_not_specialize=["rows", "parts"])
def dot_kernel(
    x,
    x_squares,
    weight,
    bias,
    gain,
    out,
    scaled,
    squares,
    eps,
    rows,
    parts,
    N: tl.constexpr,
    K: tl.constexpr,
    MP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SIDES: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """x: [rows, K], rows <= MP. weight: [N, K], or [2 * N, K] if GATED. out: [rows, N]. SIDES: parts of K walked over
    side by side, by one warp each. The rest as in `finish` and `load_squares`. OVERLAP: the launch is a dependent
    one. It waits first and lets the next launch begin last: waiting programs would take the room of working ones."""
    if OVERLAP:
        gdc_wait()
    x_sums = 0.0
    if SCALED:
        x_sums = load_squares(x_squares, rows, parts, MP, PARTS)
    row = weight_rows(tl.program_id(0), N, BN, GATED).to(tl.int64)
    if SIDES == 1:
        y = _walk(x, weight, row, rows, K, MP, BN, BK, STAGES)
    else:
        y = _walk_sides(x, weight, row, rows, K, MP, BN, BK, SIDES, STAGES)
    if OVERLAP:
        gdc_launch_dependents()
    finish(y, x_sums, bias, gain, out, scaled, squares, eps, rows, N, K, BN, MP, SCALED, BIAS, GATED, ADD, NORM)


@triton.jit
def _walk(
    x, weight, row, rows, K: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    k = tl.arange(0, BK)
    m = tl.arange(0, MP)
    w_places = weight + row[:, None] * K + k[None, :]
    x_places = x + m[None, :] * K + k[:, None]
    live = (m < rows)[None, :]
    acc = tl.zeros([BN, MP], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            w = tl.load(w_places + start, eviction_policy="evict_first")
            v = tl.load(x_places + start, mask=live, other=0.0)
        else:
            inside = start + k < K
            w = tl.load(w_places + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            v = tl.load(x_places + start, mask=live & inside[:, None], other=0.0)
        acc = tl.dot(w, v, acc)
    return acc


@triton.jit
def _walk_sides(
    x,
    weight,
    row,
    rows,
    K: tl.constexpr,
    MP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SIDES: tl.constexpr,
    STAGES: tl.constexpr,
):
    length: tl.constexpr = (K + SIDES * BK - 1) // (SIDES * BK) * BK  # of K, a side
    k = tl.arange(0, SIDES)[:, None] * length + tl.arange(0, BK)[None, :]
    m = tl.arange(0, MP)
    w_places = weight + row[None, :, None] * K + k[:, None, :]
    x_places = x + m[None, None, :] * K + k[:, :, None]
    live = (m < rows)[None, None, :]
    acc = tl.zeros([SIDES, BN, MP], tl.float32)
    for start in tl.range(0, length, BK, num_stages=STAGES):
        if K % (SIDES * BK) == 0:
            w = tl.load(w_places + start, eviction_policy="evict_first")
            v = tl.load(x_places + start, mask=live, other=0.0)
        else:
            inside = start + k < K
            w = tl.load(w_places + start, mask=inside[:, None, :], other=0.0, eviction_policy="evict_first")
            v = tl.load(x_places + start, mask=live & inside[:, :, None], other=0.0)
        acc = tl.dot(w, v, acc)
    return tl.sum(acc, axis=0)
