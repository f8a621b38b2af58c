"""Which decode rows of a step begin with the same KV blocks, so that these are read once for all of them.

Samples of one prompt share its blocks through the prefix cache; what they sampled since is their own. Equal leading
block ids are all that is looked at: nobody has to say which rows are siblings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.config import BLOCK_SIZE
from engine.request import IntArray

MEMBERS = 8
"""Rows that read one prefix together: with 4 query heads a KV head they are 32 rows of a matrix product."""

FEWEST_BLOCKS = 4
"""Shared blocks below which reading them apart costs nothing that matters."""


@dataclass(frozen=True, slots=True)
class Runs:
    """members: int32[runs, MEMBERS], decode rows, -1 where a run has fewer. lengths: int32[runs], tokens that the
    members share. seats: int32[R], run * MEMBERS + place among the members; -1 for a row in no run."""

    members: IntArray
    lengths: IntArray
    seats: IntArray

    @property
    def saved(self) -> int:
        """Tokens that are not read again for each member."""
        return int(((self.members >= 0).sum(axis=1) - 1) @ self.lengths)

    def before(self, rows: int) -> IntArray:
        """int32[rows]: leading tokens of each row that its run covers."""
        covered = np.zeros(rows, np.int32)
        seated = self.seats >= 0
        covered[seated] = self.lengths[self.seats[seated] // MEMBERS]
        return covered

    def order(self, rows: int) -> IntArray:
        """int32[rows + runs], the rows and, as rows + run, the runs, each just ahead of its members: who reads them
        next puts their parts together."""
        if not len(self.lengths):
            return np.arange(rows, dtype=np.int32)
        seats = np.where(self.seats >= 0, self.seats, len(self.members) * MEMBERS)
        return np.argsort(np.concatenate((2 * seats + 1, np.arange(len(self.members)) * 2 * MEMBERS))).astype(np.int32)


def no_runs(rows: int) -> Runs:
    return Runs(np.empty((0, MEMBERS), np.int32), np.empty(0, np.int32), np.full(rows, -1, np.int32))


def find_runs(indptr: IntArray, block_ids: IntArray, most: int) -> Runs:
    """indptr: int32[R + 1], block_ids: int32[N], the rows' KV blocks; no two rows end in the same block. Of more than
    `most` runs, those that save the most reading.

    Rows in the order of their block tables have their siblings beside them; between two neighbours lies a border where
    they share little, or less than half of what one of them shares on its other side (a system prompt, say, that all
    groups begin with).
    """
    rows = len(indptr) - 1
    if rows < 2 or most < 1:
        return no_runs(rows)
    table = _padded(indptr, block_ids)
    order = np.argsort(table.astype(">i4").view(f"S{4 * table.shape[1]}")[:, 0], kind="stable")
    table = table[order]
    # Their last blocks differ, so two rows always differ somewhere.
    shared = (table[1:] != table[:-1]).argmax(axis=1)
    sides = np.concatenate(([0], shared, [0]))
    border = (shared < FEWEST_BLOCKS) | (2 * shared < np.maximum(sides[:-2], sides[2:]))
    starts = np.concatenate(([0], np.flatnonzero(border) + 1))
    place = np.arange(rows) - np.repeat(starts, np.diff(np.append(starts, rows)))
    begins = np.flatnonzero(place % MEMBERS == 0)
    sizes = np.diff(np.append(begins, rows))
    begins, sizes = begins[sizes > 1], sizes[sizes > 1]
    if not len(begins):
        return no_runs(rows)
    # Of each run the neighbours inside it: reduceat also reduces what lies between two runs, at the odd places.
    spans = np.stack((begins, begins + sizes - 1), axis=1).ravel()
    lengths = BLOCK_SIZE * np.minimum.reduceat(np.append(shared, 0), spans)[::2]
    if len(begins) > most:
        kept = np.sort(np.argsort(-lengths * (sizes - 1), kind="stable")[:most])
        begins, sizes, lengths = begins[kept], sizes[kept], lengths[kept]
    members = np.full((len(begins), MEMBERS), -1, np.int32)
    taken = np.arange(MEMBERS) < sizes[:, None]
    members[taken] = order[(begins[:, None] + np.arange(MEMBERS))[taken]]
    seats = np.full(rows, -1, np.int32)
    seats[members[taken]] = np.flatnonzero(taken)
    return Runs(members, lengths.astype(np.int32), seats)


def _padded(indptr: IntArray, block_ids: IntArray) -> IntArray:
    """int32[R, W]: each row's blocks, then 0, the dummy, which no row holds; W is one more than the longest row has."""
    counts = np.diff(indptr)
    table = np.zeros((len(counts), int(counts.max()) + 1), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = block_ids[: indptr[-1]]
    return table
