from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.split import LEAST_STEPS, MERGE_STEPS, STEP, Tiles, cut, num_streams

STREAMS = 33


def cut_of(*lengths: int, streams: int = STREAMS, merged: bool = False) -> Tiles:
    rows = len(lengths)
    return cut(np.array(lengths, np.int32), np.arange(rows, dtype=np.int32), streams, rows + streams - 1, merged)


def tokens_of(tiles: Tiles) -> list[int]:
    """Of every stream."""
    return [int(tiles.tokens[a:b].sum()) for a, b in zip(tiles.streams[:-1], tiles.streams[1:], strict=True)]


@settings(deadline=None)
@given(st.permutations(range(40)), st.data(), st.integers(1, 132))
def test_tiles_cover_every_owner_once_and_streams_every_tile(
    order: list[int], data: st.DataObject, streams: int
) -> None:
    order = order[: data.draw(st.integers(1, 40))]
    order = np.argsort(order).astype(np.int32)
    lengths = np.array([data.draw(st.integers(1, 40_000)) for _ in order], np.int32)
    most = len(lengths) + streams + 3
    tiles = cut(lengths, order, streams, most)
    used = int(tiles.counts.sum())
    assert used <= len(lengths) + streams - 1
    assert len(tiles.owners) == len(tiles.starts) == len(tiles.tokens) == most
    for owner, length in enumerate(lengths):
        own = slice(tiles.firsts[owner], tiles.firsts[owner] + tiles.counts[owner])
        assert (tiles.owners[own] == owner).all()
        assert tiles.starts[own][0] == 0
        assert (tiles.starts[own] % STEP == 0).all()
        assert (tiles.starts[own][1:] == (tiles.starts[own] + tiles.tokens[own])[:-1]).all()
        assert tiles.tokens[own].sum() == length
    assert (np.diff(tiles.firsts[order]) > 0).all()
    assert (tiles.tokens[:used] > 0).all()
    assert not tiles.tokens[used:].any()
    assert tiles.streams[0] == 0
    assert tiles.streams[-1] == used
    assert (np.diff(tiles.streams) >= 0).all()
    assert len(tiles.streams) == streams + 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=256))
def test_no_stream_has_much_more_than_its_share(lengths: list[int]) -> None:
    steps = sum(-(-length // STEP) for length in lengths)
    share = max(-(-steps // STREAMS), LEAST_STEPS)
    assert max(tokens_of(cut_of(*lengths))) <= STEP * (share + MERGE_STEPS)


def test_a_long_row_among_short_ones_keeps_nobody_waiting() -> None:
    tiles = cut_of(*[1024] * 63, 16_384)
    assert tiles.counts[63] >= 6
    assert (tiles.counts[:63] <= 2).all()
    assert max(tokens_of(tiles)) <= -(-(63 * 1024 + 16_384) // STREAMS) + STEP


def test_rows_stay_whole_where_that_is_as_fast() -> None:
    assert (cut_of(*[768] * 64).counts == 1).all()
    assert (cut_of(*[768] * 256).counts == 1).all()
    assert (cut_of(*[320] * 8).counts == 1).all()
    assert cut_of(*[700] * 200).counts.max() == 2  # some streams would have seven, most six


def test_rows_that_are_put_together_anyway_are_cut_evenly() -> None:
    """Whole, four of the streams would have nothing."""
    lengths = [320] * 200
    assert (cut_of(*lengths, streams=38).counts == 1).all()
    assert max(tokens_of(cut_of(*lengths, streams=38, merged=True))) == -(-200 * 5 // 38) * STEP


def test_one_row_is_spread_over_the_gpu() -> None:
    assert cut_of(8192).counts[0] == STREAMS
    assert cut_of(640).counts[0] == 5
    assert cut_of(64).counts[0] == 1


def test_fewer_kv_heads_make_more_streams() -> None:
    assert [num_streams(kv_heads) for kv_heads in (8, 4, 2, 3, 264, 300)] == [33, 66, 132, 88, 1, 1]


def test_arrays_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows in 2 streams do not fit into 3 tiles"):
        cut(np.array([1, 1, 1], np.int32), np.arange(3, dtype=np.int32), 2, 3)
