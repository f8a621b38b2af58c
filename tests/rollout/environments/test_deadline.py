from __future__ import annotations

import asyncio
import gc
import time
import weakref

from rollout.environments.deadline import Deadline
from tests.rollout.workers import on_loop, soon


@on_loop
async def test_it_passes_once() -> None:
    passed: list[float] = []
    began = time.monotonic()
    deadline = Deadline(0.05, lambda: passed.append(time.monotonic() - began))
    await soon(lambda: bool(passed))
    deadline.start()
    assert len(passed) == 1
    assert passed[0] >= 0.05


@on_loop
async def test_what_is_stopped_does_not_pass_and_goes_on_with_the_rest() -> None:
    passed: list[float] = []
    deadline = Deadline(0.1, lambda: passed.append(time.monotonic()))
    deadline.stop()
    await asyncio.sleep(0.15)
    assert not passed
    began = time.monotonic()
    deadline.start()
    deadline.start()
    await soon(lambda: bool(passed))
    assert passed[0] - began > 0.05


@on_loop
async def test_one_that_is_over_passes_at_once_and_none_never() -> None:
    passed: list[int] = []
    Deadline(0.0, lambda: passed.append(1))
    assert passed == [1]
    never = Deadline(None, lambda: passed.append(2))
    never.stop()
    never.start()
    assert passed == [1]


@on_loop
async def test_what_has_ended_never_passes_and_lets_go_of_what_it_called() -> None:
    class Owner:
        def __init__(self) -> None:
            self.passed = False
            self.deadline = Deadline(0.02, self.over)

        def over(self) -> None:
            self.passed = True

    owner = Owner()
    owner.deadline.end()
    owner.deadline.start()
    await asyncio.sleep(0.05)
    assert not owner.passed
    gone = weakref.ref(owner)
    gc.disable()
    del owner
    try:
        assert gone() is None
    finally:
        gc.enable()
