from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.split import MIN_TILE, cut


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=80), st.integers(0, 64))
def test_tiles_cover_every_row_once_and_are_even(lengths: list[int], spare: int) -> None:
    tiles = cut(np.array(lengths, np.int32), len(lengths) + spare)
    used = tiles.firsts[-1]
    assert used <= len(tiles.rows) == len(lengths) + spare
    for row, length in enumerate(lengths):
        own = slice(tiles.firsts[row], tiles.firsts[row + 1])
        assert (tiles.rows[own] == row).all()
        assert tiles.starts[own][0] == 0
        assert (tiles.starts[own][1:] == tiles.stops[own][:-1]).all()
        assert tiles.stops[own][-1] == length
    sizes = tiles.stops - tiles.starts
    assert (sizes[:used] > 0).all()
    assert not sizes[used:].any()
    longest = sizes.max()
    split = max(lengths) > longest
    # A shorter tile length would not have fitted.
    if split or longest > MIN_TILE:
        tile = -(-longest // MIN_TILE) * MIN_TILE
        assert tile == MIN_TILE or sum(-(-length // (tile - MIN_TILE)) for length in lengths) > len(lengths) + spare


def test_a_long_row_among_short_ones_is_cut_and_they_are_not() -> None:
    tiles = cut(np.array([1024] * 63 + [16384], np.int32), 96)
    assert (np.diff(tiles.firsts)[:63] == 1).all()
    assert tiles.firsts[64] - tiles.firsts[63] == 16


def test_more_rows_than_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows do not fit into 2 tiles"):
        cut(np.array([1, 1, 1], np.int32), 2)
