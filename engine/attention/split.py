"""How the decode rows of a step are cut into tiles of even length, so that no row makes the others wait.

The cut is made on the host, once a step, and shared by all layers. It depends on lengths only; its arrays have a
fixed size per bucket, so that a captured graph reads them at fixed addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.request import IntArray

MIN_TILE = 64
"""Tokens; cutting finer costs more in merging than it gains in parallel reads."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """rows, starts, stops: int32[capacity], tile t covers tokens [starts[t], stops[t]) of decode row rows[t]; unused
    tiles have start == stop == 0. firsts: int32[R + 1], the tiles of row r are [firsts[r], firsts[r + 1])."""

    rows: IntArray
    starts: IntArray
    stops: IntArray
    firsts: IntArray


def cut(lengths: npt.NDArray[np.int32], capacity: int, step: int = MIN_TILE) -> Tiles:
    """Cut rows of `lengths` (each at least 1) into at most `capacity` tiles, `capacity` at least one a row.

    The tile length is the smallest multiple of `step` with which they fit, found by bisection: the number of tiles
    falls as tiles grow.
    """
    if capacity < len(lengths):
        raise ValueError(f"{len(lengths)} rows do not fit into {capacity} tiles")
    low, high = 1, -(-int(lengths.max()) // step)
    while low < high:
        middle = (low + high) // 2
        if int(np.sum(-(-lengths // (middle * step)))) <= capacity:
            high = middle
        else:
            low = middle + 1
    tile = low * step
    counts = -(-lengths // tile)
    firsts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(counts, out=firsts[1:])
    used = int(firsts[-1])
    rows, starts, stops = np.zeros((3, capacity), np.int32)
    rows[:used] = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    starts[:used] = (np.arange(used, dtype=np.int32) - firsts[rows[:used]]) * tile
    stops[:used] = np.minimum(starts[:used] + tile, lengths[rows[:used]])
    return Tiles(rows, starts, stops, firsts)
