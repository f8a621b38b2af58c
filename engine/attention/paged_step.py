"""Attention of one step on the GPU: decode rows over even tiles, prefill chunks through FlashInfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.shared import MEMBERS
from engine.attention.split import capacity, most_runs
from engine.kernels.paged_decode import DecodeScratch, paged_decode


class Prefill(Protocol):
    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> Any: ...


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Views of the step's input for `rows` decode rows; shapes as in `paged_decode`."""

    rows: int
    tile_owners: Tensor
    tile_starts: Tensor
    tile_stops: Tensor
    first_tiles: Tensor
    tile_counts: Tensor
    seats: Tensor
    members: Tensor
    block_indptr: Tensor
    block_ids: Tensor
    scratch: DecodeScratch

    @classmethod
    def of(cls, fixed: Mapping[str, Tensor], rows: int, scratch: DecodeScratch) -> DecodeStep:
        """fixed: `CudaInput.fixed`."""
        tiles, runs = capacity(rows), most_runs(rows)
        return cls(
            rows,
            fixed["tile_owners"][:tiles],
            fixed["tile_starts"][:tiles],
            fixed["tile_stops"][:tiles],
            fixed["first_tiles"][: rows + runs],
            fixed["tile_counts"][: rows + runs],
            fixed["seats"][:rows],
            fixed["members"][: runs * MEMBERS],
            fixed["block_indptr"][: rows + 1],
            fixed["block_ids"],
            scratch,
        )

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(q)
        self.write(q, keys, values, out)
        return out.flatten(1)

    def write(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """`attend` into out [rows, heads, head_dim]."""
        paged_decode(
            q,
            keys,
            values,
            self.tile_owners,
            self.tile_starts,
            self.tile_stops,
            self.first_tiles,
            self.tile_counts,
            self.seats,
            self.members,
            self.block_indptr,
            self.block_ids,
            self.scratch,
            out,
        )


@dataclass(frozen=True, slots=True)
class MixedStep:
    """Decode rows first, then prefill chunks: one output, at most two calls a layer."""

    decode: DecodeStep | None
    prefill: Prefill | None

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(q)
        first = 0
        if self.decode is not None:
            first = self.decode.rows
            self.decode.write(q[:first], keys, values, out[:first])
        if self.prefill is not None:
            self.prefill.run(q[first:], (keys, values), out=out[first:])
        return out.flatten(1)
