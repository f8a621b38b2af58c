"""The first half of an RMS norm, for rows that no linear made: times gain, and the sums of squares. Twin: `Scaled`'s
own words; its second half is in `skinny_parts.finish`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def scale(x: torch.Tensor, gain: torch.Tensor, scaled: torch.Tensor, squares: torch.Tensor) -> None:
    """x [M, K] times gain [K] to scaled [M, K]; squares [parts, M] gets a row's sum of squares first, then zeros."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    parts = len(squares)
    padded = triton.next_power_of_2(parts)
    scale_kernel[(rows,)](x, gain, scaled, squares, rows, parts, WIDTH=width, BLOCK=block, PARTS=padded, num_warps=4)


@triton.jit(do_not_specialize=["rows", "parts"])
def scale_kernel(x, gain, scaled, squares, rows, parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(gain + column, mask=live, other=0.0).to(tl.float32)
    tl.store(scaled + row * WIDTH + column, (value * weight).to(scaled.dtype.element_ty), mask=live)
    part = tl.arange(0, PARTS)
    sums = tl.where(part == 0, tl.sum(value * value), 0.0)
    tl.store(squares + part * rows + row, sums, mask=part < parts)
