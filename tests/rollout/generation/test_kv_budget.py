from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import BLOCK_SIZE
from engine.scheduling.kv_holds import LONG_WAIT
from rollout.generation.kv_budget import KINDS, WINDOW, Candidate, Growths, Kind, KvBudget

FAR = 10**6


def candidate(
    key: str, *, prompt: int = 160, group: str | None = None, longest: int = FAR, kind: str = "k"
) -> Candidate:
    return Candidate(key, key if group is None else group, kind, prompt, longest)


def start(budget: KvBudget, count: int, first: int = 0, **fields: object) -> int:
    """Start as many of `count` as may start."""
    for i in range(count):
        what = candidate(f"{first + i}", **fields)  # type: ignore[arg-type]
        if not budget.may_start(what):
            return i
        budget.start(what)
    return count


def learned(kv_tokens: int, *grown: int) -> KvBudget:
    """A budget that has seen trajectories end which grew that far."""
    budget = KvBudget(kv_tokens)
    for i, more in enumerate(grown):
        what = candidate(f"old{i}")
        budget.start(what)
        budget.grew(what.key, what.prompt + more)
        budget.end(what.key, tells=True)
    return budget


# What is expected.


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def expected(kind: Kind, grown: int) -> float:
    return float(kind.expected(ints(grown))[0])


def test_growths_beyond_a_point() -> None:
    growths = Growths()
    for grown in (5, 1, 9, 5):
        growths.add(grown)
    np.testing.assert_array_equal(growths.beyond(ints(0, 1, 5, 9)), [5.0, 19 / 3, 9.0, np.nan])
    growths.remove(9)
    growths.remove(5)
    np.testing.assert_array_equal(growths.beyond(ints(1, 5)), [5.0, np.nan])
    assert (growths.largest, len(growths)) == (5, 2)


def test_the_latest_ends_count_and_older_ones_are_forgotten() -> None:
    kind = Kind()
    for _ in range(WINDOW):
        kind.end(1000)
    for _ in range(WINDOW):
        kind.end(10)
    assert expected(kind, 0) == 10
    assert kind.largest == 10


def test_what_has_outgrown_the_short_ones_is_expected_to_end_like_the_long_ones() -> None:
    kind = Kind()
    for grown in (10, 10, 10, 110):
        kind.end(grown)
    assert expected(kind, 0) == 35
    assert expected(kind, 10) == 110
    assert expected(kind, 110) == 137.5, "longer than all: a quarter more"


def test_where_nothing_has_ended_those_that_run_tell() -> None:
    kind = Kind()
    assert expected(kind, 0) == 0
    for grown in (0, 40, 60):
        kind.running.add(grown)
    assert expected(kind, 0) == 50
    assert expected(kind, 60) == 60


def test_that_short_ones_end_first_deceives_nobody() -> None:
    kind = Kind()
    kind.end(10)
    for _ in range(7):
        kind.running.add(500)
    assert expected(kind, 0) == 500


def test_of_many_kinds_those_are_remembered_that_run_or_ran_last() -> None:
    budget = learned(10**6)
    budget.start(candidate("stays", kind="runs"))
    for i in range(2 * KINDS):
        budget.start(candidate("a", kind=f"k{i}"))
        budget.end("a", tells=True)
        if i % 2:
            budget.start(candidate("b", kind="again"))
            budget.end("b", tells=True)
    assert len(budget._kinds) == KINDS
    assert {"runs", "again", f"k{2 * KINDS - 1}"} < budget._kinds.keys()
    assert "k0" not in budget._kinds


# Who may start.


def test_one_may_always_start_where_nothing_runs() -> None:
    budget = learned(160, 10_000)
    large = candidate("large", prompt=100_000)
    assert budget.may_start(large)
    budget.start(large)
    assert not budget.may_start(candidate("next"))
    budget.leave("large")
    assert budget.may_start(candidate("next")), "its KV is free, though its end is not told yet"


def test_as_many_start_as_fit_to_their_ends() -> None:
    budget = learned(10 * 320, 160)
    assert start(budget, 20) == 9, "of 20 blocks each, and one in flight"


def test_a_prompt_is_counted_once_for_its_siblings() -> None:
    budget = learned(10 * 320, 160)
    assert start(budget, 40, group="g") == (200 - 10) // 11


def test_the_prompt_stays_until_its_last_sibling_ends() -> None:
    budget = learned(640, 0)
    for key in "ab":
        budget.start(candidate(key, prompt=320, group="g"))
    other = candidate("other", prompt=320)
    assert not budget.may_start(other)
    budget.end("a", tells=False)
    assert not budget.may_start(other)
    budget.end("b", tells=False)
    assert budget.may_start(other)


def test_siblings_tell_more_than_strangers() -> None:
    budget = learned(100 * BLOCK_SIZE, *[800] * 20)
    for key in "abc":
        budget.start(candidate(key, group="g", prompt=16))
    for key in "ab":
        budget.grew(key, 16 + 32)
        budget.end(key, tells=True)
    assert start(budget, 40, group="g", prompt=16) > 20
    assert start(learned(100 * BLOCK_SIZE, *[800] * 20), 40, group="g", prompt=16) == 1


def test_nothing_is_expected_to_outgrow_its_limit() -> None:
    budget = learned(10 * 320, 10_000)
    assert start(budget, 20, longest=320) == 9


def test_kinds_learn_apart() -> None:
    budget = learned(3200, 10_000)
    assert start(budget, 20, kind="other") >= 15


def test_what_was_cut_off_tells_nothing() -> None:
    budget = KvBudget(3200)
    budget.start(candidate("cut"))
    budget.grew("cut", 3000)
    budget.end("cut", tells=False)
    assert start(budget, 20) >= 15


def test_more_start_as_the_first_come_near_their_ends() -> None:
    budget = learned(10 * 320, *[160] * 10)
    assert start(budget, 20) == 9
    for i in range(9):
        budget.grew(f"{i}", 160 + (150 if i < 6 else 0))
    assert budget.may_start(candidate("next")), "six are about to end, before it has grown"


def test_a_trajectory_that_begins_anew_shorter_than_its_prompt_has_not_grown() -> None:
    budget = KvBudget(3200)
    budget.start(candidate("branched", prompt=160))
    budget.grew("branched", 320)
    budget.grew("branched", 100)
    assert budget._running["branched"].grown == 0
    assert budget.may_go_on("branched")


def test_growth_beyond_expectation_stops_the_next_ones() -> None:
    budget = learned(100 * BLOCK_SIZE, 16)
    assert start(budget, 4) == 4
    for i in range(4):
        budget.grew(f"{i}", 160 + 300)
    assert not budget.may_start(candidate("next"))


def test_those_that_stay_away_make_room_beyond_half_of_the_pool() -> None:
    def budget(wait: float) -> KvBudget:
        made = learned(100 * BLOCK_SIZE, *[160] * 10)
        count = start(made, 20)
        for i in range(count):
            away = made.grew(f"{i}", 320, wait)
            assert away == (wait >= LONG_WAIT)
        return made

    assert not budget(LONG_WAIT / 2).may_start(candidate("next"))
    assert start(budget(LONG_WAIT), 20, first=100) == 3, "of 84 blocks 50 stay held"


# Who may go on.


def test_the_oldest_goes_on_and_the_newest_wait_for_what_it_may_need() -> None:
    budget = KvBudget(100 * BLOCK_SIZE)
    assert start(budget, 8) == 8, "nothing was known"
    for i in range(8):
        budget.grew(f"{i}", 160 + 160)
    may = [budget.may_go_on(f"{i}") for i in range(8)]
    assert may == sorted(may, reverse=True)
    assert may[0]
    assert 3 <= sum(may) < 8
    for i in range(4):
        budget.leave(f"{i}")
    assert all(budget.may_go_on(f"{i}") for i in range(4, 8))


def test_the_oldest_goes_on_however_large() -> None:
    budget = KvBudget(160)
    start(budget, 1)
    budget.start(candidate("second"))
    budget.grew("0", 10_000)
    assert budget.may_go_on("0")
    assert not budget.may_go_on("second")
    budget.end("0", tells=True)
    assert budget.may_go_on("second")


def test_who_is_here_waits_for_nobody_who_is_away() -> None:
    budget = learned(800, 320)
    started, late = start(budget, 20), candidate("late")
    assert not budget.may_start(late)
    for i in range(started):
        budget.stays_away(f"{i}")
    assert budget.may_start(late)
    budget.start(late)
    assert budget.may_go_on("late")
    assert not budget.may_start(candidate("later")), "late is here"
    budget.grew("0", 320)
    assert not budget.may_go_on("late"), "so is an older one"


# Whatever happens.


@given(
    pool=st.integers(1, 200),
    lengths=st.lists(
        st.tuples(st.integers(1, 400), st.lists(st.integers(1, 200), min_size=1, max_size=4)), max_size=25
    ),
    siblings=st.integers(1, 4),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_all_trajectories_come_to_their_ends(
    pool: int, lengths: list[tuple[int, list[int]]], siblings: int, chance: random.Random
) -> None:
    """In every order of events somebody may go on, and nothing is left behind."""
    budget = KvBudget(pool * BLOCK_SIZE)
    queue = [
        (candidate(f"{i}", prompt=prompt, group=f"{i // siblings}"), turns) for i, (prompt, turns) in enumerate(lengths)
    ]
    running: dict[str, tuple[int, list[int]]] = {}
    while queue or running:
        while queue and budget.may_start(queue[0][0]):
            what, turns = queue.pop(0)
            budget.start(what)
            running[str(what.key)] = what.prompt, list(turns)
        able = [key for key in running if budget.may_go_on(key)]
        assert able, "deadlock"
        key = chance.choice(able)
        length, turns = running[key]
        length += turns.pop(0)
        budget.grew(key, length, chance.choice((0.0, 1.0)))
        if turns:
            running[key] = length, turns
        else:
            del running[key]
            if chance.random() < 0.5:
                budget.leave(key)
            budget.end(key, tells=chance.random() < 0.8)
    assert not budget._running
    assert not budget._siblings
    assert budget._shared == 0
    assert all(kind.running.largest == 0 for kind in budget._kinds.values())


@given(
    prompts=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    grown=st.integers(0, 500),
    known=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_where_everything_fits_nobody_waits(prompts: list[int], grown: int, known: bool) -> None:
    needed = sum(-(-prompt // BLOCK_SIZE) + -(-grown // BLOCK_SIZE) + 2 for prompt in prompts)
    budget = learned(needed * BLOCK_SIZE, *([grown] * 5 if known else []))
    for i, prompt in enumerate(prompts):
        what = candidate(f"{i}", prompt=prompt)
        assert budget.may_start(what)
        budget.start(what)
    for part in range(1, 4):
        for i, prompt in enumerate(prompts):
            budget.grew(f"{i}", prompt + grown * part // 3)
            assert budget.may_go_on(f"{i}")
