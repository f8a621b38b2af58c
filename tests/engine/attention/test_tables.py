from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.shared import MEMBERS, find_runs, no_runs
from engine.attention.split import STEP, capacity, most_runs
from engine.attention.tables import Tables, lay_out
from engine.config import BLOCK_SIZE


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Block tables of the decode rows of a step, their lengths, and how many rows of padding follow."""
    ids = iter(range(1, 100_000))
    tables, lengths = [], []
    for blocks, members in draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 11)), min_size=1, max_size=6)):
        shared = [next(ids) for _ in range(blocks)]
        for tokens in draw(st.lists(st.integers(1, 400), min_size=members, max_size=members)):
            tables.append(shared + [next(ids) for _ in range(-(-tokens // BLOCK_SIZE))])
            lengths.append(blocks * BLOCK_SIZE + tokens)
    order = draw(st.permutations(range(len(tables))))
    return [tables[i] for i in order], [lengths[i] for i in order], draw(st.integers(0, 5))


@settings(deadline=None)
@given(steps(), st.sampled_from([1, 2, 33, 66]))
def test_every_row_reads_each_of_its_tokens_once_by_itself_or_by_its_run(
    step: tuple[list[list[int]], list[int], int], streams: int
) -> None:
    blocks, lengths, padding = step
    rows = len(blocks) + padding
    indptr = np.cumsum([0, *map(len, blocks)], dtype=np.int32)
    ids = np.concatenate(blocks).astype(np.int32)
    runs = find_runs(indptr, ids, most_runs(rows))
    tokens = np.array(lengths, np.int32)
    tables = lay_out(tokens, runs, rows, streams).at(tokens, indptr)

    assert all(getattr(tables, name).dtype == np.int32 for name in Tables.names())
    assert len(tables.tile_owners) == capacity(rows, streams)
    assert tables.streams[0] == 0
    assert tables.streams[-1] == np.count_nonzero(tables.tile_tokens)

    def places(row_ids: npt.NDArray[np.int32], tokens: int) -> npt.NDArray[np.int32]:
        return (row_ids[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()[:tokens]

    read = []
    for owner in range(rows + len(runs.lengths)):
        own = range(tables.first_tiles[owner], tables.first_tiles[owner] + tables.tile_counts[owner])
        assert all(tables.tile_owners[tile] == owner for tile in own)
        read.append([places(ids[tables.tile_blocks[tile] :], tables.tile_tokens[tile]) for tile in own])
    for row, (table, length) in enumerate(zip(blocks, lengths, strict=True)):
        seat = tables.seats[row]
        assert seat < 0 or tables.members[seat] == row
        shared = read[rows + seat // MEMBERS] if seat >= 0 else []
        assert np.array_equal(np.concatenate(shared + read[row]), places(np.array(table, np.int32), length))
    assert not any(read[row] for row in range(len(blocks), rows))


@settings(deadline=None)
@given(steps(), st.integers(0, 5), st.integers(1, 3))
def test_a_layout_that_holds_is_the_one_that_would_be_made(
    step: tuple[list[list[int]], list[int], int], padding: int, grown: int
) -> None:
    blocks, lengths, _ = step
    rows = len(blocks) + padding
    tokens = np.array(lengths, np.int32)
    indptr = np.cumsum([0, *map(len, blocks)], dtype=np.int32)
    runs = find_runs(indptr, np.concatenate(blocks).astype(np.int32), most_runs(rows))
    layout = lay_out(tokens, runs, rows, 33)
    later = tokens + grown
    held = np.cumsum([0, *-(-later // BLOCK_SIZE)], dtype=np.int32)
    fresh = lay_out(later, runs, rows, 33).at(later, held)
    assert not layout.holds(tokens, runs, rows + 1)
    assert not layout.holds(tokens[1:], runs, rows)
    if layout.holds(later, runs, rows):
        kept = layout.at(later, held)
        assert all(np.array_equal(getattr(kept, name), getattr(fresh, name)) for name in Tables.names())
    else:
        own, own_later = tokens - runs.before(len(blocks)), later - runs.before(len(blocks))
        assert (-(-own_later // STEP) != -(-own // STEP)).any()


def test_a_row_that_grows_keeps_its_layout_until_it_has_another_step() -> None:
    runs, kept = no_runs(1), 0
    layout = lay_out(np.array([100], np.int32), runs, 1, 33)
    for length in range(101, 129):
        kept += layout.holds(np.array([length], np.int32), runs, 1)
    assert kept == 28
    assert not layout.holds(np.array([129], np.int32), runs, 1)
    assert not layout.holds(np.array([100], np.int32), no_runs(1), 1)
