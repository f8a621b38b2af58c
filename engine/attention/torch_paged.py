"""Attention over the paged KV pool in plain torch: the CPU's path, and the twin of the GPU's.

Positions that a row does not have are never read: their place in a padded gather is taken by the row's own first
token, which is always written, and their score by -inf. So whatever a free block holds, NaN included, cannot leak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import BLOCK_SIZE
from engine.model.config import ModelConfig
from engine.runner.input import PrefillRow, StepInput


class AttentionStep(Protocol):
    """Attention of one step, planned once and used by every layer."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [T, heads, head_dim] over a layer's pool [blocks, 16, kv_heads, head_dim] -> [T, heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """index: int64[rows * kv_heads * longest] into the pool seen as [.., head_dim]; bias: 0 or -inf for the scores
    [rows, kv_heads, query heads of a KV head, longest], None when all rows are of one length."""

    rows: int
    index: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """index: int64[kv_len] into the pool seen as [.., kv_heads, head_dim]; bias: None for a causal square."""

    start: int
    stop: int
    index: Tensor
    bias: Tensor | None


class TorchPagedAttention:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._kv_heads = config.num_kv_heads
        self._in_block = torch.arange(BLOCK_SIZE, device=device)
        self._heads = torch.arange(config.num_kv_heads, device=device)[:, None]

    def plan(self, step: StepInput) -> AttentionStep:
        """Prepare what all layers of a step share."""
        decode = self._plan_decode(step) if step.num_decode else None
        return TorchPagedStep(decode, tuple(self._plan_prefill(step, chunk) for chunk in step.chunks))

    def _plan_decode(self, step: StepInput) -> _Decode:
        rows = step.num_decode
        offsets = torch.arange(step.longest_decode, device=self._device)
        bias = None
        if step.shortest_decode < step.longest_decode:
            live = offsets < step.kv_lens[:rows, None]
            offsets = torch.where(live, offsets, 0)
            bias = torch.zeros(live.shape, dtype=self._dtype, device=self._device).masked_fill_(~live, -torch.inf)
            bias = bias[:, None, None]
        held = step.block_ids[step.block_indptr[:rows, None] + offsets // BLOCK_SIZE]
        tokens = held.long() * BLOCK_SIZE + offsets % BLOCK_SIZE
        return _Decode(rows, (tokens[:, None] * self._kv_heads + self._heads).view(-1), bias)

    def _plan_prefill(self, step: StepInput, chunk: PrefillRow) -> _Prefill:
        stop, length = chunk.start + chunk.length, chunk.context + chunk.length
        held = step.block_ids[chunk.first_block : chunk.first_block - (-length // BLOCK_SIZE)]
        index = (held.long()[:, None] * BLOCK_SIZE + self._in_block).view(-1)[:length]
        bias = None
        if chunk.context:
            future = torch.arange(length, device=self._device) > step.positions[chunk.start : stop, None]
            bias = torch.zeros(future.shape, dtype=self._dtype, device=self._device).masked_fill_(future, -torch.inf)
        return _Prefill(chunk.start, stop, index, bias)


@dataclass(frozen=True, slots=True)
class TorchPagedStep:
    decode: _Decode | None
    prefill: tuple[_Prefill, ...]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        parts = [] if self.decode is None else [_attend_decode(self.decode, q, keys, values)]
        parts += [_attend_prefill(chunk, q, keys, values) for chunk in self.prefill]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_decode(decode: _Decode, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query token a row. The query heads of one KV head stand as its query tokens, so K and V are read once."""
    kv_heads, dim = keys.shape[2:]
    grouped = (decode.rows, kv_heads, -1, dim)
    out = functional.scaled_dot_product_attention(
        q[: decode.rows].reshape(grouped),
        keys.view(-1, dim).index_select(0, decode.index).view(grouped),
        values.view(-1, dim).index_select(0, decode.index).view(grouped),
        attn_mask=decode.bias,
    )
    return out.reshape(decode.rows, -1)


def _attend_prefill(chunk: _Prefill, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Query tokens of one row over their context and, causally, each other."""
    kv_heads, dim = keys.shape[2], keys.shape[3]
    q = q[chunk.start : chunk.stop].transpose(0, 1)[None]
    k = keys.view(-1, kv_heads, dim).index_select(0, chunk.index).transpose(0, 1)[None]
    v = values.view(-1, kv_heads, dim).index_select(0, chunk.index).transpose(0, 1)[None]
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=chunk.bias, is_causal=chunk.bias is None, enable_gqa=True
    )
    return out[0].transpose(0, 1).reshape(chunk.stop - chunk.start, -1)
