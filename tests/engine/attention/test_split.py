from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.split import WAVE, Tiles, capacity, cut


def cut_of(*lengths: int) -> Tiles:
    return cut(np.array(lengths, np.int32), capacity(len(lengths)))


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=300))
def test_tiles_cover_every_row_once(lengths: list[int]) -> None:
    tiles = cut_of(*lengths)
    used = tiles.counts.sum()
    assert used <= len(tiles.rows) == capacity(len(lengths))
    for row, length in enumerate(lengths):
        own = slice(tiles.firsts[row], tiles.firsts[row] + tiles.counts[row])
        assert (tiles.rows[own] == row).all()
        assert tiles.starts[own][0] == 0
        assert (tiles.starts[own][1:] == tiles.stops[own][:-1]).all()
        assert tiles.stops[own][-1] == length
    sizes = tiles.stops - tiles.starts
    assert (sizes[:used] > 0).all()
    assert not sizes[used:].any()


@given(st.lists(st.integers(1, 40_000), min_size=33, max_size=256))
def test_no_tile_is_longer_than_its_fair_share_by_much(lengths: list[int]) -> None:
    """The longest tile is at most what every place of a wave has to read, give or take a step of the candidates."""
    tiles = cut_of(*lengths)
    share = sum(lengths) / WAVE
    assert (tiles.stops - tiles.starts).max() <= max(1.5 * share + 256, 128)


def test_a_long_row_among_short_ones_is_cut_and_they_stay_whole_where_that_is_as_fast() -> None:
    tiles = cut_of(*[800] * 255, 12_800)
    assert tiles.counts[255] > 8
    assert (tiles.counts[:255] == 1).all()
    assert tiles.firsts[255] == 0


def test_equal_rows_that_fill_whole_waves_are_not_cut() -> None:
    assert (cut_of(*[1024] * 66).counts == 1).all()


def test_one_row_is_spread_over_the_gpu() -> None:
    assert cut_of(8192).counts[0] >= WAVE // 2
    assert cut_of(32_768).counts[0] >= WAVE // 2


def test_a_short_row_is_not_cut_finer_than_a_read() -> None:
    assert cut_of(64).counts[0] == 1


def test_more_rows_than_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows do not fit into 2 tiles"):
        cut(np.array([1, 1, 1], np.int32), 2)
