"""The seam to the device: one function per kernel that a GPU would fuse.

`TorchOps` is the CPU path and the twin each kernel is tested against. Everything is called under inference mode,
with no data-dependent shape. T is the number of tokens of a step; x is dtype[T, hidden] in the worker's dtype; what
is computed in between is fp32, rounded once.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

HEAD_SLICE = 8192
"""Vocabulary rows of the head that are held in fp32 at once when the worker's dtype is another."""


Normed = TypeVar("Normed")
"""What a device hands from a norm to the linear behind it: the normed rows, or what they are made of."""


class Ops(Protocol[Normed]):
    """What the model asks of a device. Residuals are changed in place."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows `ids` (int64[T]) of weight [vocab, hidden], in memory of their own."""

    def norm(self, residual: Tensor, weight: Tensor, eps: float) -> Normed:
        """residual / sqrt(mean(residual^2) + eps) * weight over the last axis."""

    def linear(self, x: Normed, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias."""

    def gate_up(self, x: Normed, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of [gate, up] = x @ weight.T + bias, for weight [2 * inner, hidden]: [T, inner]."""

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        """Add x @ weight.T + bias to `residual`."""

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
    ) -> Normed:
        """`linear_add`, then `norm` of the residual with the weight `norm`."""

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
        """Norm and turn the heads of q and k, write k and v to the cache, return q as [T, heads, head_dim].

        qkv: [T, (heads + 2 * kv_heads) * head_dim]. qk_norm: [2, head_dim] (q's and k's weight) or None.
        rope: fp32[T, 2, head_dim], rows of `rope_table` at each token's position.
        write_slots: int64[T], block * 16 + offset. keys, values: [blocks, 16, kv_heads, head_dim], written in place.
        """

    def head_fp32(self, x: Normed, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits fp32[rows, vocab], never rounded to the worker's dtype; into `out` if given."""


class TorchOps:
    """`Ops` in plain torch. At batch 1 the cost is the number of calls, so each op is written for few of them."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight.index_select(0, ids)

    def norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _normed(residual.float(), eps).mul_(weight).to(residual.dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def gate_up(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_mul(functional.linear(x, weight, bias))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2 * inner] = [gate, up]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate.float()).mul_(up).to(gate_up.dtype)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        residual.add_(functional.linear(x, weight, bias))

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
    ) -> Tensor:
        return self.norm(residual.add_(functional.linear(x, weight, bias)), norm, eps)

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
        tokens, (kv_heads, dim) = qkv.shape[0], keys.shape[2:]
        qkv = qkv.view(tokens, -1, dim)
        heads = qkv.shape[1] - 2 * kv_heads
        x = qkv[:, : heads + kv_heads].float()
        if qk_norm is not None:
            x = _normed(x, eps)
            x[:, :heads].mul_(qk_norm[0])
            x[:, heads:].mul_(qk_norm[1])
        # rotate_half(x) * sin is the halves swapped times a sine whose first half is negative.
        swapped = x.reshape(tokens, -1, 2, dim // 2).flip(2).view(x.shape)
        turned = (x * rope[:, :1]).addcmul_(swapped, rope[:, 1:]).to(qkv.dtype)
        keys.view(-1, kv_heads, dim).index_copy_(0, write_slots, turned[:, heads:])
        values.view(-1, kv_heads, dim).index_copy_(0, write_slots, qkv[:, heads + kv_heads :])
        return turned[:, :heads]

    def head_fp32(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if weight.dtype == torch.float32:
            return torch.matmul(x, weight.t(), out=out)
        # torch's CPU build cannot multiply bf16 into fp32; a whole head in fp32 would double the memory of the model.
        x, starts = x.float(), range(0, len(weight), HEAD_SLICE)
        slices = [functional.linear(x, weight[i : i + HEAD_SLICE].float()) for i in starts]
        return torch.cat(slices, dim=-1, out=out)


def _normed(x: Tensor, eps: float) -> Tensor:
    """x (fp32) over its root mean square."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
