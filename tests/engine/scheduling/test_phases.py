"""Seconds of a request by phase: they add up, whatever is paused meanwhile."""

from __future__ import annotations

from dataclasses import astuple

from engine.request import Times
from engine.scheduling.phases import PausableClock, PhaseTimes
from tests.engine.host import Clock


def test_each_moment_belongs_to_one_phase() -> None:
    clock = Clock()
    times = PhaseTimes(PausableClock(clock))
    for phase, seconds in (("prefill", 1), ("decode", 2), ("preempted", 4), ("prefill", 8), ("decode", 16)):
        clock.now += seconds
        times.enter(phase)  # type: ignore[arg-type]
    clock.now += 32
    assert times.end() == Times(queue=1, prefill=2 + 16, decode=4 + 32, preempted=8)


def test_a_pause_belongs_to_no_phase() -> None:
    clock = Clock()
    pausable = PausableClock(clock)
    before = PhaseTimes(pausable)
    clock.now += 1
    assert pausable.pause() == clock.now
    clock.now += 2
    within = PhaseTimes(pausable)
    pausable.pause()
    clock.now += 4
    pausable.resume()
    pausable.resume()
    clock.now += 8
    assert before.end() == Times(queue=9, paused=6)
    assert within.end() == Times(queue=8, paused=4)
    assert sum(astuple(before.end())) == 15
