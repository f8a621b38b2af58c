from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.shared import MEMBERS, find_runs
from engine.attention.split import capacity, most_runs
from engine.attention.tables import Tables, tables_of
from engine.config import BLOCK_SIZE


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Block tables of the decode rows of a step, their lengths, and how many rows of padding follow."""
    ids = iter(range(1, 100_000))
    tables, lengths = [], []
    for blocks, members in draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 11)), min_size=1, max_size=12)):
        shared = [next(ids) for _ in range(blocks)]
        for tokens in draw(st.lists(st.integers(1, 400), min_size=members, max_size=members)):
            tables.append(shared + [next(ids) for _ in range(-(-tokens // BLOCK_SIZE))])
            lengths.append(blocks * BLOCK_SIZE + tokens)
    order = draw(st.permutations(range(len(tables))))
    return [tables[i] for i in order], [lengths[i] for i in order], draw(st.integers(0, 5))


@given(steps(), st.sampled_from([1, 2, 33, 66]))
def test_every_row_reads_each_of_its_tokens_once_by_itself_or_by_its_run(
    step: tuple[list[list[int]], list[int], int], streams: int
) -> None:
    blocks, lengths, padding = step
    rows = len(blocks) + padding
    indptr = np.cumsum([0, *map(len, blocks)], dtype=np.int32)
    ids = np.concatenate(blocks).astype(np.int32)
    runs = find_runs(indptr, ids, most_runs(rows))
    tables = tables_of(np.array(lengths, np.int32), indptr, runs, rows, streams)

    assert all(getattr(tables, name).dtype == np.int32 for name in Tables.names())
    assert len(tables.tile_owners) == capacity(rows, streams)
    assert tables.streams[0] == 0
    assert tables.streams[-1] == np.count_nonzero(tables.tile_tokens)
    read: dict[int, list[int]] = {owner: [] for owner in range(rows + len(runs.lengths))}
    for owner, tiles in read.items():
        for tile in range(tables.first_tiles[owner], tables.first_tiles[owner] + tables.tile_counts[owner]):
            assert tables.tile_owners[tile] == owner
            first, tokens = tables.tile_blocks[tile], tables.tile_tokens[tile]
            tiles.extend(
                int(ids[first + token // BLOCK_SIZE]) * BLOCK_SIZE + token % BLOCK_SIZE for token in range(tokens)
            )
    for row, (table, length) in enumerate(zip(blocks, lengths, strict=True)):
        seat = tables.seats[row]
        shared = read[rows + seat // MEMBERS] if seat >= 0 else []
        assert seat < 0 or tables.members[seat] == row
        assert shared + read[row] == [table[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(length)]
    assert not any(read[row] for row in range(len(blocks), rows))
