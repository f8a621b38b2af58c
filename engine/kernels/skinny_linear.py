"""Linears over few rows, bound by reading W: one launch with the norm before them and what comes after them.

W stays where it is and passes once; no sum depends on timing, so the same input gives the same bits. Twins: the ops of
`TorchOps`. Which kernel and which tile a shape gets is `tile`'s rule, in one place, from the measurements of
`bench.linears` on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from engine.attention.split import MULTIPROCESSORS
from engine.kernels.overlap import can_overlap
from engine.kernels.scale import scale
from engine.kernels.skinny_dot import dot_kernel
from engine.kernels.skinny_vector import vector_kernel

MAX_ROWS = 16
"""From 17 rows on cuBLAS reads W faster than these kernels, by more than a launch saved."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows on their way through an RMS norm: `x * gain`, whose root mean square is still to be divided by.

    x: dtype[M, K]. squares: fp32[parts, M], summing to the sums of squares of the rows before the gain.
    """

    x: Tensor
    squares: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Tile:
    """rows, depth: of W, read at a time. sides: parts of K walked over side by side. ahead: tiles under way."""

    rows: int
    depth: int
    sides: int
    warps: int
    ahead: int


def tile(rows: int, weight_rows: int, gated: bool = False) -> Tile:
    """For `rows` rows of x and a W of so many. A W of few rows is cut finer, so that every multiprocessor has a share
    of it, and what a program has under way grows in turn."""
    few = weight_rows <= 5000
    if rows == 1:
        return Tile(4, 512, 1, 2, 8) if few else Tile(8, 512, 1, 2, 4)
    if few:
        return Tile(16, 128, 4, 4, 4)
    if rows <= 8 and weight_rows <= 64 * MULTIPROCESSORS and not gated:
        return Tile(32, 128, 2, 2, 4)
    return Tile(64, 64, 1, 4, 5) if gated else Tile(64, 128, 1, 4, 4)


def norm(x: Tensor, weight: Tensor, eps: float) -> Scaled:
    """x [M, K], where no linear made it."""
    scaled = torch.empty_like(x)
    squares = torch.empty(_parts(*x.shape), len(x), dtype=torch.float32, device=x.device)
    scale(x, weight, scaled, squares)
    return Scaled(scaled, squares, eps)


def linear(
    x: Scaled, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """norm(x) @ weight.T + bias, rounded to x's dtype or to `dtype`; into `out` [M, N] if given."""
    if out is None:
        out = x.x.new_empty(len(x.x), len(weight), dtype=dtype)
    _launch(x.x, x, weight, bias, out)
    return out


def gate_up(x: Scaled, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(gate) * up of [gate, up] = norm(x) @ weight.T + bias. weight: [2 * N, K]. Returns [M, N]."""
    out = x.x.new_empty(len(x.x), len(weight) // 2)
    _launch(x.x, x, weight, bias, out, gated=True)
    return out


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """Add x @ weight.T + bias to `residual` [M, N] in place; the sum is rounded once."""
    _launch(x, None, weight, bias, residual, add=True)


def linear_add_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, eps: float
) -> Scaled:
    """`linear_add`, and the norm of the new residual."""
    squares = torch.empty(_parts(*residual.shape), len(x), dtype=torch.float32, device=x.device)
    after = Scaled(torch.empty_like(residual), squares, eps)
    _launch(x, None, weight, bias, residual, add=True, gain=gain, after=after)
    return after


def _parts(rows: int, hidden: int) -> int:
    """Parts of a row's sum of squares: one a program of a linear that ends in the residual."""
    return -(-hidden // tile(rows, hidden).rows)


def _launch(
    x: Tensor,
    before: Scaled | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
    add: bool = False,
    gain: Tensor | None = None,
    after: Scaled | None = None,
) -> None:
    rows, depth = x.shape
    shape = tile(rows, len(weight), gated)
    parts = 0 if before is None else len(before.squares)
    overlap = can_overlap(x.device)
    tensors = (
        x,
        x if before is None else before.squares,
        weight,
        weight if bias is None else bias,
        weight if gain is None else gain,
        out,
        out if after is None else after.x,
        out if after is None else after.squares,
        1e-6 if before is None else before.eps,
    )
    options: dict[str, Any] = {
        "N": out.shape[1],
        "K": depth,
        "BN": shape.rows,
        "BK": shape.depth,
        "PARTS": triton.next_power_of_2(max(parts, 1)),
        "SCALED": before is not None,
        "BIAS": bias is not None,
        "GATED": gated,
        "ADD": add,
        "NORM": after is not None,
        "OVERLAP": overlap,
        "num_warps": shape.warps,
        **({"launch_pdl": True} if overlap else {}),
    }
    grid = (triton.cdiv(len(weight), shape.rows),)
    if rows == 1:
        ring = min(shape.ahead, triton.cdiv(depth, shape.depth))
        vector_kernel[grid](*tensors, parts, RING=ring, **options)
    else:
        padded = max(8, triton.next_power_of_2(rows))
        dot_kernel[grid](*tensors, rows, parts, MP=padded, SIDES=shape.sides, STAGES=shape.ahead, **options)
