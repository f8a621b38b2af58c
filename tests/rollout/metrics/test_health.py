from __future__ import annotations

from typing import Any

import pytest

from engine.handle import EngineStats
from rollout.metrics.health import Beat, Health


def beat(time: float, *, state: str = "ready", version: int = 0, reported: float | None = None, **stats: Any) -> Beat:
    return Beat(time, state, version, EngineStats(**stats), time if reported is None else reported)


def health(*beats: Beat) -> Health:
    made = Health(patience=30.0)
    for one in beats:
        made.beat(one)
    return made


def test_before_the_first_beat_it_lives_and_is_not_ready() -> None:
    assert health().alive(1e9).good
    assert not health().ready(0.0).good


def test_steps_that_are_made_are_life_and_steps_that_are_not_are_none() -> None:
    working = health(beat(0, running=1, steps_total=5), beat(40, running=1, steps_total=6))
    assert working.alive(45).good
    stuck = health(beat(0, running=1, steps_total=5), beat(40, running=1, steps_total=5))
    assert stuck.alive(40).why == "the engine has work and made no step for 40 s"
    assert not stuck.ready(40).good


@pytest.mark.parametrize("stats", [{}, {"running": 3, "paused": True}], ids=["idle", "paused"])
def test_an_engine_without_steps_to_make_lives_while_it_answers(stats: dict[str, Any]) -> None:
    answers = health(beat(0, steps_total=5, **stats), beat(100, steps_total=5, **stats))
    assert answers.alive(110).good
    silent = health(beat(0, steps_total=5, **stats), beat(100, reported=60, steps_total=5, **stats))
    assert silent.alive(100).why == "the engine has not answered for 40 s"


def test_the_patience_begins_when_work_comes() -> None:
    made = health(beat(0, steps_total=5), beat(100, steps_total=5), beat(101, running=1, steps_total=5))
    assert made.alive(120).good
    made.beat(beat(131, running=1, steps_total=5))
    assert not made.alive(131).good


def test_an_event_loop_that_does_not_come_round_is_told_by_the_clock_alone() -> None:
    assert health(beat(0)).alive(31).why == "the event loop has not come round for 31 s"


def test_a_dead_engine_is_neither_alive_nor_ready() -> None:
    dead = health(beat(0, state="dead"))
    assert (dead.alive(0).good, dead.alive(0).why) == (False, "the engine died")
    assert not dead.ready(0).good


def test_a_worker_that_winds_down_asks_nothing_and_is_alive() -> None:
    assert health(beat(0), beat(100, state="draining", reported=5)).alive(100).good


@pytest.mark.parametrize(
    ("state", "good"), [("ready", True), ("updating", True), ("paused", False), ("draining", False)]
)
def test_ready_takes_work(state: str, good: bool) -> None:
    assert health(beat(0, state=state)).ready(1).good is good


def test_ready_serves_the_committed_version() -> None:
    behind = health(beat(0, version=3, weight_version=2))
    assert behind.ready(1).why == "version 3 is committed, 2 serves"
    assert health(beat(0, version=3, weight_version=3)).ready(1).good
