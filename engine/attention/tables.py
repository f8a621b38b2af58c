"""What decode attention finds on the device beside queries and KV: tiles, and who owns them.

From step to step rows grow by a token each, and most of it stays as it is (`Layout`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.attention.shared import Runs
from engine.attention.split import capacity, cut, steps_of
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Tables but for what each step changes: the places of blocks, and the tokens of each row's last tile.

    rows: padding included. before, steps, lasts, begins: int32[decodes], of the rows that are no padding: the tokens
    that its run reads for it, the steps of STEP tokens that it reads itself, its last tile, and the tokens ahead of it.
    sources, offsets: int32[T], the row whose blocks a tile reads, and from which of them on.
    """

    runs: Runs
    rows: int
    before: IntArray
    steps: IntArray
    tables: Tables[IntArray]
    sources: IntArray
    offsets: IntArray
    lasts: IntArray
    begins: IntArray

    def holds(self, lengths: IntArray, runs: Runs, rows: int) -> bool:
        """Would `lay_out` of these be the same?"""
        same = runs is self.runs and rows == self.rows and len(lengths) == len(self.before)
        return same and np.array_equal(steps_of(lengths - self.before), self.steps)

    def at(self, lengths: IntArray, indptr: IntArray) -> Tables[IntArray]:
        """lengths: int32[decodes], for which it holds. indptr: int32[decodes + 1], the rows' blocks among the step's
        block ids."""
        tokens = self.tables.tile_tokens.copy()
        tokens[self.lasts] = lengths - self.begins
        return replace(self.tables, tile_blocks=indptr[self.sources] + self.offsets, tile_tokens=tokens)


def lay_out(lengths: IntArray, runs: Runs, rows: int, streams: int) -> Layout:
    """lengths: int32[decodes], the tokens of each row that is no padding. rows: padding included."""
    decodes, padding = len(lengths), np.zeros(rows - len(lengths), np.int32)
    before = runs.before(decodes)
    owned = np.concatenate((lengths - before, runs.lengths))
    tiles = cut(owned, runs.order(decodes), streams, capacity(rows, streams), merged=len(runs.lengths) > 0)
    names = np.arange(decodes + len(runs.lengths), dtype=np.int32)
    names[decodes:] += len(padding)
    skipped = np.concatenate((before, np.zeros_like(runs.lengths)))
    lasts = tiles.firsts[:decodes] + tiles.counts[:decodes] - 1
    tables = Tables(
        names[tiles.owners],
        np.zeros_like(tiles.owners),
        tiles.tokens,
        tiles.streams,
        np.concatenate((tiles.firsts[:decodes], padding, tiles.firsts[decodes:])),
        np.concatenate((tiles.counts[:decodes], padding, tiles.counts[decodes:])),
        np.concatenate((runs.seats, padding - 1)),
        runs.members.ravel(),
    )
    return Layout(
        runs,
        rows,
        before,
        steps_of(lengths - before),
        tables,
        np.concatenate((names[:decodes], runs.members[:, 0]))[tiles.owners],
        (skipped[tiles.owners] + tiles.starts) // BLOCK_SIZE,
        lasts,
        before + tiles.starts[lasts],
    )
