"""What the kernels of a linear over few rows share: which rows of W a program takes, and what it does with its sums.

Beside the product a launch holds the RMS norm of its input, the gate of an MLP, and the add to the residual. The norm
needs no pass of its own: y = sum(x * gain * w) / rms(x), where `x * gain` and partial sums of x^2 were written by the
launch that made x.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_rows(program, N: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """BN rows of W; of [gate, up] half are gate's and half the same rows of up. Past the end the last row again."""
    row = tl.arange(0, BN)
    if GATED:
        half: tl.constexpr = BN // 2
        taken = tl.minimum(program * half + row % half, N - 1) + (row // half) * N
    else:
        taken = tl.minimum(program * BN + row, N - 1)
    return taken


@triton.jit
def load_squares(squares, rows, parts, MP: tl.constexpr, PARTS: tl.constexpr):
    """fp32[PARTS, MP] of squares [parts, rows]. Loaded before the product and summed after it: nothing waits."""
    part = tl.arange(0, PARTS)
    m = tl.arange(0, MP)
    live = (part < parts)[:, None] & (m < rows)[None, :]
    return tl.load(squares + part[:, None] * rows + m[None, :], mask=live, other=0.0)


@triton.jit
def finish(
    y,
    x_squares,
    bias,
    gain,
    out,
    scaled,
    squares,
    eps,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    MP: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    """y: fp32[BN, MP], products of a program's `weight_rows`; x_squares: what `load_squares` gave.

    ADD: add to what `out` holds. NORM: also write the sum, rounded, times gain to `scaled`, and this program's part
    of the sum of its squares to `squares`.
    """
    program = tl.program_id(0)
    m = tl.arange(0, MP)
    if SCALED:
        y = y * (1.0 / tl.sqrt(tl.sum(x_squares, axis=0) / K + eps))[None, :]
    if BIAS:
        y += tl.load(bias + weight_rows(program, N, BN, GATED)).to(tl.float32)[:, None]
    width: tl.constexpr = BN // 2 if GATED else BN
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, width, MP]), (1, 2, 0)))
        y = gate / (1.0 + tl.exp(-gate)) * up
    column = program * width + tl.arange(0, width)
    live = (column < N)[:, None] & (m < rows)[None, :]
    place = m[None, :] * N + column[:, None]
    if ADD:
        y += tl.load(out + place, mask=live, other=0.0).to(tl.float32)
    rounded = y.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=live)
    if NORM:
        x = tl.where(live, rounded.to(tl.float32), 0.0)
        weight = tl.load(gain + column, mask=column < N, other=0.0).to(tl.float32)
        tl.store(scaled + place, (x * weight[:, None]).to(scaled.dtype.element_ty), mask=live)
        tl.store(squares + program * rows + m, tl.sum(x * x, axis=0), mask=m < rows)
