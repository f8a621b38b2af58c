from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.shared import FEWEST_BLOCKS, MEMBERS, Runs, find_runs

Tables = list[list[int]]


def runs_of(tables: Tables, most: int = 1000) -> Runs:
    indptr = np.cumsum([0, *map(len, tables)]).astype(np.int32)
    return find_runs(indptr, np.array([block for table in tables for block in table], np.int32), most)


def families(prefixes: list[int], samples: list[int], own: int = 2, system: int = 0) -> Tables:
    """Family f: samples[f] rows over system + prefixes[f] shared blocks, each with `own` of its own."""
    fresh = iter(range(1, 1_000_000))
    first = [next(fresh) for _ in range(system)]
    shared = [first + [next(fresh) for _ in range(count)] for count in prefixes]
    return [
        [*blocks, *(next(fresh) for _ in range(own))]
        for blocks, n in zip(shared, samples, strict=True)
        for _ in range(n)
    ]


def check(tables: Tables, runs: Runs) -> None:
    """What every set of runs promises, whatever it was found in."""
    for run, (members, length) in enumerate(zip(runs.members.tolist(), runs.lengths.tolist(), strict=True)):
        real = [row for row in members if row >= 0]
        assert len(real) > 1
        assert members == real + [-1] * (MEMBERS - len(real))
        blocks = length // 16
        assert length % 16 == 0
        assert blocks >= FEWEST_BLOCKS
        assert len({tuple(tables[row][:blocks]) for row in real}) == 1
        assert all(len(tables[row]) > blocks for row in real)
        for place, row in enumerate(real):
            assert runs.seats[row] == run * MEMBERS + place
    assert np.count_nonzero(runs.seats >= 0) == np.count_nonzero(runs.members >= 0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(0, 12),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.integers(1, 30),
)
def test_members_share_what_the_run_says(shape, system, own, random, most) -> None:
    tables = families([p for p, _ in shape], [n for _, n in shape], own, system)
    random.shuffle(tables)
    runs = runs_of(tables, most)
    check(tables, runs)
    assert len(runs.lengths) <= most


def test_siblings_are_found_wherever_they_are_in_the_batch() -> None:
    tables = families([64, 64, 10], [8, 3, 1])
    order = np.random.default_rng(0).permutation(len(tables))
    runs = runs_of([tables[i] for i in order])
    assert sorted(runs.lengths.tolist()) == [1024, 1024]
    assert sorted(np.count_nonzero(runs.members >= 0, axis=1).tolist()) == [3, 8]


def test_groups_behind_one_system_prompt_are_told_apart() -> None:
    runs = runs_of(families([64] * 4, [8] * 4, system=20))
    assert runs.lengths.tolist() == [84 * 16] * 4


def test_rows_that_share_only_a_system_prompt_read_that_once() -> None:
    runs = runs_of(families([30] * 8, [1] * 8, system=20))
    assert runs.lengths.tolist() == [20 * 16]


def test_a_large_group_is_several_runs() -> None:
    runs = runs_of(families([64], [20]))
    assert np.count_nonzero(runs.members >= 0, axis=1).tolist() == [8, 8, 4]


def test_a_group_whose_last_run_would_have_one_member_leaves_that_alone() -> None:
    runs = runs_of(families([64], [9]))
    assert len(runs.lengths) == 1
    assert np.count_nonzero(runs.seats < 0) == 1


def test_of_too_many_runs_those_that_save_most_are_kept() -> None:
    runs = runs_of(families([8, 64, 16, 32], [4, 4, 8, 2]), most=2)
    assert sorted(runs.lengths.tolist()) == [256, 1024]
    assert len(runs_of(families([8], [4]), most=0).lengths) == 0


def test_rows_of_their_own_share_nothing() -> None:
    runs = runs_of(families([3, 0, 3], [4, 9, 2]))
    assert len(runs.lengths) == 0
    assert (runs.seats == -1).all()


def test_a_run_is_read_just_ahead_of_its_members_and_rows_of_their_own_last() -> None:
    runs = runs_of(families([64, 0, 5, 9], [2, 1, 11, 3]))
    places = np.argsort(runs.order(17))
    assert sorted(places) == list(range(17 + len(runs.lengths)))
    for run, members in enumerate(runs.members):
        count = np.count_nonzero(members >= 0)
        assert places[members[:count]].tolist() == [places[17 + run] + 1 + place for place in range(count)]
    assert places[:17][runs.seats < 0].tolist() == [20]


def test_without_runs_rows_are_read_as_they_come() -> None:
    assert runs_of(families([1, 0], [3, 2])).order(5).tolist() == [0, 1, 2, 3, 4]


def test_what_is_covered_is_what_the_run_shares() -> None:
    tables = families([64, 0, 5], [2, 1, 2])
    assert runs_of(tables).before(5).tolist() == [1024, 1024, 0, 80, 80]
