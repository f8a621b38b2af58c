"""How the decode rows of a step are cut into tiles, so that no row makes the others wait.

The cut is made on the host, once a step, and shared by all layers. It depends on lengths only; its arrays have a
fixed size per batch size, so that a captured graph reads them at fixed addresses. What several rows share (`Runs`) is
cut like a row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.request import IntArray

CANDIDATES = 64 * np.array(
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 256, 512, 1024]
)
"""Tile lengths tried, in tokens: multiples of what the kernel reads at a time."""

WAVE = 33
"""Tiles that run at once on 132 multiprocessors: two programs each, one program for each of 8 KV heads of a tile."""

START_COST = 48
"""What beginning and ending a tile costs, in tokens of reading."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """rows, starts, stops: int32[capacity], tile t covers tokens [starts[t], stops[t]) of decode row rows[t]; unused
    tiles have start == stop == 0. firsts, counts: int32[R], row r has counts[r] tiles from firsts[r] on. The longest
    row comes first: what takes longest should not begin last."""

    rows: IntArray
    starts: IntArray
    stops: IntArray
    firsts: IntArray
    counts: IntArray


SHARE_FROM = 16
"""Decode rows from which on shared prefixes are read once: below, the attention of a step is short anyway."""


def capacity(rows: int) -> int:
    """Tiles that a step of `rows` decode rows may be cut into: two waves at least, and two waves beyond one a row and
    one for every eighth row, for what it shares."""
    return 2 * WAVE + (rows + rows // 8 if rows > WAVE else 0)


def most_runs(rows: int) -> int:
    """Runs of rows with a shared prefix that a step of `rows` decode rows may have."""
    return min(rows // 2, capacity(rows) - rows) if rows >= SHARE_FROM else 0


def cut(lengths: npt.NDArray[np.int32], most: int) -> Tiles:
    """Cut rows of `lengths` (each at least 1) into at most `most` tiles, `most` at least one a row.

    Of the candidate lengths the one with the shortest estimated time: full waves of the mean tile, or the longest
    tile alone. Rows of one tile need no merging, so equal estimates go to the longer tile.
    """
    if most < len(lengths):
        raise ValueError(f"{len(lengths)} rows do not fit into {most} tiles")
    longest, total = int(lengths.max()), int(lengths.sum())
    counts = -(-lengths[None, :] // CANDIDATES[:, None])
    tiles = counts.sum(axis=1)
    mean, largest = total / tiles, np.minimum(CANDIDATES, longest)
    time = np.maximum(-(-tiles // WAVE) * (mean + START_COST), largest + START_COST)
    time[tiles > most] = np.inf
    best = len(time) - 1 - int(np.argmin(time[::-1]))
    # Past the last candidate a row is one tile whatever its length.
    length = longest if np.isinf(time[best]) else int(CANDIDATES[best])
    return _tiles(lengths, length, most)


def _tiles(lengths: npt.NDArray[np.int32], length: int, most: int) -> Tiles:
    counts = -(-lengths // length)
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    ends = np.cumsum(counts[order], dtype=np.int32)
    used = int(ends[-1])
    firsts = np.empty_like(ends)
    firsts[order] = ends - counts[order]
    rows, starts, stops = np.zeros((3, most), np.int32)
    rows[:used] = np.repeat(order, counts[order])
    starts[:used] = (np.arange(used, dtype=np.int32) - firsts[rows[:used]]) * length
    stops[:used] = np.minimum(starts[:used] + length, lengths[rows[:used]])
    return Tiles(rows, starts, stops, firsts, counts)
