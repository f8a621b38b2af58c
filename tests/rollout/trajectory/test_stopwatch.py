"""Each moment is counted once: whatever the engine claims, the parts add up to the wall time."""

from __future__ import annotations

import random

import pytest

from engine.request import Times as EngineTimes
from protocols.fields import Times
from rollout.trajectory import stopwatch
from rollout.trajectory.stopwatch import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stopwatch, "time", made)
    return made


def test_what_the_engine_does_not_account_for_is_queue(clock: Clock) -> None:
    watch = Stopwatch(98.0)
    watch.queued()
    clock.now += 4.0
    turn = watch.turn(EngineTimes(queue=0.5, prefill=1.0, decode=2.0))
    assert turn == Times(queue=1.0, prefill=1.0, decode=2.0)
    clock.now += 0.25
    assert watch.tool() == 0.25
    clock.now += 8.0
    watch.paused()
    assert watch.total == Times(queue=3.0, prefill=1.0, decode=2.0, paused=8.0, tool_wait=0.25)
    assert watch.wall_s == 14.25
    clock.now += 1.0
    assert watch.wall_s == 14.25, "what was not told yet is not counted"


def test_an_engine_that_claims_more_than_there_was_is_cut_down(clock: Clock) -> None:
    watch = Stopwatch(None)
    clock.now += 2.0
    turn = watch.turn(EngineTimes(prefill=1.0, decode=3.0))
    assert (turn.prefill, turn.decode, turn.queue) == (0.5, 1.5, 0.0)
    assert watch.turn(EngineTimes(decode=3.0)).decode == 0.0, "no time has passed"
    assert watch.wall_s == 2.0


@pytest.mark.parametrize("seed", range(5))
def test_any_walk_adds_up(clock: Clock, seed: int) -> None:
    chance = random.Random(seed)
    watch = Stopwatch(clock.now - chance.random())
    turns = Times()
    for _ in range(50):
        clock.now += chance.choice((0.0, chance.random()))
        match chance.randrange(4):
            case 0:
                watch.queued()
            case 1:
                watch.paused()
            case 2:
                watch.tool()
            case _:
                claimed = {part: chance.choice((0.0, chance.random())) for part in stopwatch.ENGINE_PARTS}
                turn = watch.turn(EngineTimes(**claimed))
                turns = Times(**{name: getattr(turns, name) + getattr(turn, name) for name in Times.model_fields})
    total = watch.total.model_dump()
    assert sum(total.values()) == pytest.approx(watch.wall_s)
    assert all(getattr(turns, part) <= total[part] + 1e-9 for part in stopwatch.ENGINE_PARTS)
    assert total["prefill"] == pytest.approx(turns.prefill)
