"""`Ops` on an NVIDIA GPU: cuBLAS for the linears, Triton for what lies between them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.qk_norm_rope_write import qk_norm_rope_write
from engine.kernels.silu_mul import silu_mul


class CudaOps:
    """The kernels behind the model; shapes as in `Ops`. Every call can be captured in a CUDA graph."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight.index_select(0, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

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

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def head_fp32(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
