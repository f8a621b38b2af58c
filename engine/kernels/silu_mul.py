"""silu(gate) * up in one launch. Twin: `TorchOps.silu_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * inner] = [gate, up] -> [T, inner]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    silu_mul_kernel[(triton.cdiv(inner, block), rows)](gate_up, out, inner, BLOCK=block, num_warps=4)
    return out


@triton.jit
def silu_mul_kernel(gate_up, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * inner + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * inner + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=live)
