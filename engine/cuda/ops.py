"""`Ops` on an NVIDIA GPU. Few rows: linears with what lies around them in one launch. Many: cuBLAS, and Triton between;
up to 256 rows, gate and up in one launch of our own.

A step goes one of the ways by its number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import gate_up, skinny_linear
from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.qk_norm_rope_write import qk_norm_rope_write
from engine.kernels.silu_mul import silu_mul
from engine.kernels.skinny_linear import Scaled
from engine.model.config import ModelConfig

FUSED_CAPABILITIES = (9, 10)
"""Of the GPU: from 9 on a launch may overlap the one before it; others than these lack the shared memory."""

HALVED_ROWS = 256
"""Up to so many rows a linear back to `hidden` has too few tiles to fill the GPU, unless its sums are cut in two."""


class CudaOps:
    """The kernels behind the model; shapes as in `Ops`. Every call can be captured in a CUDA graph."""

    def __init__(self, config: ModelConfig, fused: bool | None = None) -> None:
        """fused: whether up to 256 rows take ways of their own; by default where the GPU can. Compiles what is CUDA."""
        if fused is None:
            fused = torch.cuda.get_device_capability()[0] in FUSED_CAPABILITIES
        self._fused_rows = skinny_linear.MAX_ROWS if fused else 0
        self._gated_rows = 0
        if fused and not config.mlp_bias and gate_up.fits(config.intermediate_size, config.hidden_size):
            gate_up.prepare(config.intermediate_size)
            self._gated_rows = gate_up.MAX_ROWS

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight.index_select(0, ids)

    def norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor | Scaled:
        if len(residual) <= self._fused_rows:
            return skinny_linear.norm(residual, weight, eps)
        return rms_norm(residual, weight, eps)

    def linear(self, x: Tensor | Scaled, weight: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(x, Scaled):
            return skinny_linear.linear(x, weight, bias)
        return functional.linear(x, weight, bias)

    def gate_up(self, x: Tensor | Scaled, weight: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(x, Scaled):
            return skinny_linear.gate_up(x, weight, bias)
        if len(x) <= self._gated_rows:
            return gate_up.gate_up(x, weight)
        return silu_mul(functional.linear(x, weight, bias))

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        if len(x) <= self._fused_rows:
            skinny_linear.linear_add(x, weight, bias, residual)
        elif bias is None:
            residual.addmm_(x, weight.t())
        else:
            residual.add_(functional.linear(x, weight, bias))

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
    ) -> Tensor | Scaled:
        if len(x) <= self._fused_rows:
            return skinny_linear.linear_add_norm(x, weight, bias, residual, norm, eps)
        if bias is None and len(x) <= HALVED_ROWS:
            return add_rms_norm(halved(x, weight), residual, norm, eps)
        return add_rms_norm(functional.linear(x, weight, bias), residual, norm, eps)

    def qk_norm_rope_write(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        rope: Tensor,
        write_slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        return qk_norm_rope_write(qkv, qk_norm, eps, rope, write_slots, keys, values)

    def head_fp32(self, x: Tensor | Scaled, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if isinstance(x, Scaled):
            return skinny_linear.linear(x, weight, None, torch.float32, out)
        if out is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)


def halved(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] in two sums over half of K each: float32[2, T, N]."""
    rows, width = x.shape
    left = x.view(rows, 2, width // 2).transpose(0, 1)
    right = weight.view(len(weight), 2, width // 2).permute(1, 2, 0)
    return torch.bmm(left, right, out_dtype=torch.float32)
