"""What decode attention finds on the device beside queries and KV: tiles, and who owns them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.attention.shared import Runs
from engine.attention.split import capacity, cut
from engine.config import BLOCK_SIZE
from engine.request import IntArray

Array = TypeVar("Array", IntArray, Tensor)


@dataclass(frozen=True, slots=True)
class Tables(Generic[Array]):
    """int32 arrays, of numpy or torch. An owner of tiles is one of R rows, padding included, or R + a run.

    tile_owners, tile_blocks, tile_tokens: [T], the owner, where in the step's block ids the tile's begin, and how many
    tokens it has; none where a tile is not used. streams: [S + 1], stream s has the tiles from streams[s] up to
    streams[s + 1]. first_tiles, tile_counts: [R + runs], of an owner. seats: [R], run * MEMBERS + place among its
    members, -1 in no run. members: [runs * MEMBERS], rows, -1 where a run has fewer.
    """

    tile_owners: Array
    tile_blocks: Array
    tile_tokens: Array
    streams: Array
    first_tiles: Array
    tile_counts: Array
    seats: Array
    members: Array

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    def on(self, device: torch.device) -> Tables[Tensor]:
        """Of numpy arrays, on a device."""
        arrays = (getattr(self, name) for name in self.names())
        return Tables(*(torch.from_numpy(array).to(device) for array in arrays))


def tables_of(lengths: IntArray, indptr: IntArray, runs: Runs, rows: int, streams: int) -> Tables[IntArray]:
    """lengths: int32[decodes], the tokens of each row that is no padding; indptr: int32[decodes + 1], its blocks among
    the step's block ids. rows: padding included."""
    decodes = len(lengths)
    before = runs.before(decodes)
    owned = np.concatenate((lengths - before, runs.lengths))
    tiles = cut(owned, runs.order(decodes), streams, capacity(rows, streams), merged=len(runs.lengths) > 0)
    owners = np.concatenate((np.arange(decodes), rows + np.arange(len(runs.lengths)))).astype(np.int32)
    blocks = np.concatenate((indptr[:-1] + before // BLOCK_SIZE, indptr[runs.members[:, 0]]))
    padding = np.zeros(rows - decodes, np.int32)
    return Tables(
        owners[tiles.owners],
        blocks[tiles.owners] + tiles.starts // BLOCK_SIZE,
        tiles.tokens,
        tiles.streams,
        np.concatenate((tiles.firsts[:decodes], padding, tiles.firsts[decodes:])),
        np.concatenate((tiles.counts[:decodes], padding, tiles.counts[decodes:])),
        np.concatenate((runs.seats, padding - 1)),
        runs.members.ravel(),
    )
