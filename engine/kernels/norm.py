"""RMS norm, alone and with the residual added first, one launch each; one program a row.

Twin: `TorchOps.norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.overlap import between_linears


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, hidden] over its root mean square, times weight."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to `residual` [T, hidden] in place and return the norm of the (rounded) sum.

    x: [T, hidden], or float32[parts, T, hidden] whose sum is meant.
    """
    return _launch(x, residual, weight, eps)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, hidden = x.shape[-2:]
    out = torch.empty(rows, hidden, dtype=weight.dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    overlap = between_linears(rows, x.device)
    norm_kernel[(rows,)](
        x,
        out if residual is None else residual,
        weight,
        out,
        eps,
        rows,
        PARTS=len(x) if x.dim() == 3 else 1,
        HIDDEN=hidden,
        BLOCK=block,
        ADD=residual is not None,
        OVERLAP=overlap,
        num_warps=max(1, min(8, block // 512)),
        **({"launch_pdl": True} if overlap else {}),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    rows,
    PARTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    live = column < HIDDEN
    gain = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(x + start + column, mask=live, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        row += tl.load(x + part * rows.to(tl.int64) * HIDDEN + start + column, mask=live, other=0.0)
    if ADD:
        row += tl.load(residual + start + column, mask=live, other=0.0).to(tl.float32)
        rounded = row.to(residual.dtype.element_ty)
        tl.store(residual + start + column, rounded, mask=live)
        row = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(row * row) / HIDDEN + eps)
    tl.store(out + start + column, (row * scale * gain).to(out.dtype.element_ty), mask=live)
