"""How the decode rows of a step are cut into tiles, so that no row makes the others wait.

Rows, one behind the other, are cut into streams of the same number of tokens: each has one program for every KV head,
all of them run at once, and end together. The cut is made on the host, shared by all layers, and kept from step to step
while it stays the same (`engine.attention.tables.Layout`).
It depends on lengths only; its arrays have a fixed size per batch size, so that a captured graph reads them at fixed
addresses. What several rows share (`Runs`) is cut like a row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.request import IntArray

STEP = 64
"""Tokens that the kernel reads at a time: rows are cut at multiples of it."""

LEAST_STEPS = 2
"""Of a stream: with fewer, putting the parts of a row together takes longer than reading them."""

MERGE_STEPS = 4
"""What putting a row's parts together costs, in steps of reading."""

MULTIPROCESSORS = 132
"""Of an H100 or H200."""

PROGRAMS = 2 * MULTIPROCESSORS
"""That run at once."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """owners, starts, tokens: int32[capacity], tile t covers tokens[t] tokens of owners[t] from starts[t] on; unused
    tiles have none. firsts, counts: int32[R], owner r has counts[r] tiles from firsts[r] on. streams: int32[S + 1],
    stream s has the tiles from streams[s] up to streams[s + 1]."""

    owners: IntArray
    starts: IntArray
    tokens: IntArray
    firsts: IntArray
    counts: IntArray
    streams: IntArray


SHARE_FROM = 16
"""Decode rows from which on shared prefixes are read once: below, the attention of a step is short anyway."""

LEAST_SAVED = 40_000
"""Tokens less to read by which sharing pays: fewer take less time, much of them from the L2, than the parts of all the
rows take to be put together (on an H200, with 8 KV heads of 128)."""


def num_streams(kv_heads: int) -> int:
    return max(1, PROGRAMS // kv_heads)


def capacity(rows: int, streams: int) -> int:
    """Tiles that a step of `rows` decode rows may be cut into: a row, or what rows share, is one tile, and one more for
    every border between two streams that lies in it."""
    return rows + most_runs(rows) + streams - 1


def most_runs(rows: int) -> int:
    """Runs of rows with a shared prefix that a step of `rows` decode rows may have."""
    return min(rows // 2, rows // 8 + 66) if rows >= SHARE_FROM else 0


def steps_of(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return -(-lengths // STEP)


def cut(lengths: npt.NDArray[np.int32], order: IntArray, streams: int, most: int, merged: bool = False) -> Tiles:
    """Cut owners of `lengths` (each at least 1), read in `order` (int32[R]), into `streams`.

    most: length of the arrays, at least a tile for each owner and one for every border between streams. merged: rows
    are put together of parts anyway.
    """
    if most < len(lengths) + streams - 1:
        raise ValueError(f"{len(lengths)} rows in {streams} streams do not fit into {most} tiles")
    steps = steps_of(lengths[order])
    ends = np.cumsum(steps, dtype=np.int64)
    borders = _borders(ends, streams, 0 if merged else MERGE_STEPS)
    edges = np.unique(np.concatenate((borders, ends)))
    used = len(edges) - 1
    places = np.searchsorted(ends, edges[:-1], side="right")
    owners, starts, tokens = np.zeros((3, most), np.int32)
    owners[:used] = order[places]
    starts[:used] = (edges[:-1] - (ends - steps)[places]) * STEP
    tokens[:used] = np.minimum(np.diff(edges) * STEP, lengths[owners[:used]] - starts[:used])
    firsts, counts = np.empty((2, len(lengths)), np.int32)
    first_edges = np.searchsorted(edges, ends - steps)
    firsts[order] = first_edges
    counts[order] = np.diff(first_edges, append=used)
    return Tiles(owners, starts, tokens, firsts, counts, np.searchsorted(edges, borders).astype(np.int32))


def _borders(ends: npt.NDArray[np.int64], streams: int, slack: int) -> npt.NDArray[np.int64]:
    """int64[streams + 1], in steps, as `ends`, int64[R], of the rows: as many whole rows in each stream where that
    takes at most `slack` more, else as many steps."""
    total = int(ends[-1])
    rows = -(-len(ends) // streams)
    whole = np.append(0, ends[np.minimum(np.arange(1, streams + 1) * rows, len(ends)) - 1])
    parts = min(streams, -(-total // LEAST_STEPS))
    if np.diff(whole).max() <= -(-total // parts) + slack:
        return whole
    return np.minimum(np.arange(streams + 1), parts) * total // parts
