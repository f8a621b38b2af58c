"""Attention of one step on the GPU: decode rows over even streams, prefill chunks through FlashInfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.shared import MEMBERS
from engine.attention.split import capacity, most_runs
from engine.attention.tables import Tables
from engine.kernels import tma_decode
from engine.kernels.paged_decode import DecodeScratch, paged_decode


class DecodeKernel(Protocol):
    """As `paged_decode`."""

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tables[Tensor],
        block_ids: Tensor,
        scratch: DecodeScratch,
        out: Tensor,
    ) -> None: ...


def choose_decode_kernel(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> DecodeKernel:
    """The faster one that is written for this, compiled."""
    if tma_decode.fits(heads, kv_heads, dim, dtype):
        tma_decode.prepare(heads, kv_heads, dim)
        return tma_decode.paged_decode
    return paged_decode


class Prefill(Protocol):
    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Any: ...


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Views of the step's input for `rows` decode rows; shapes as in `paged_decode`."""

    rows: int
    tables: Tables[Tensor]
    block_ids: Tensor
    kernel: DecodeKernel
    scratch: DecodeScratch

    @classmethod
    def of(cls, fixed: Mapping[str, Tensor], rows: int, kernel: DecodeKernel, scratch: DecodeScratch) -> DecodeStep:
        """fixed: `CudaInput.fixed`."""
        runs = most_runs(rows)
        tiles, owners = capacity(rows, len(fixed["streams"]) - 1), rows + runs
        tables = Tables(
            fixed["tile_owners"][:tiles],
            fixed["tile_blocks"][:tiles],
            fixed["tile_tokens"][:tiles],
            fixed["streams"],
            fixed["first_tiles"][:owners],
            fixed["tile_counts"][:owners],
            fixed["seats"][:rows],
            fixed["members"][: runs * MEMBERS],
        )
        return cls(rows, tables, fixed["block_ids"], kernel, scratch)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(q)
        self.write(q, keys, values, out)
        return out.flatten(1)

    def write(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """`attend` into out [rows, heads, head_dim]."""
        self.kernel(q, keys, values, self.tables, self.block_ids, self.scratch, out)


@dataclass(frozen=True, slots=True)
class MixedStep:
    """Decode rows first, then prefill chunks: one output, at most two calls a layer."""

    decode: DecodeStep | None
    prefill: Prefill | None

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(q)
        self.write(q, keys, values, out)
        return out.flatten(1)

    def write(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """`attend` into out [T, heads, head_dim]."""
        first = 0
        if self.decode is not None:
            first = self.decode.rows
            self.decode.write(q[:first], keys, values, out[:first])
        if self.prefill is not None:
            self.prefill.run(q[first:], (keys, values), out=out[first:])
