from __future__ import annotations

import asyncio
import time

from rollout.generation.pace import FIRST, TURN_S, Lanes, Pace
from tests.rollout.workers import on_loop, soon


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Steps:
    """`left` steps, each of which wakes a task that takes `seconds`; how many there were in each turn."""

    def __init__(self, left: int, seconds: float = 0.0) -> None:
        self.left = left
        self.seconds = seconds
        self.bursts: list[int] = []
        self.pace = Pace(self.step)

    def step(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.bursts[-1] += 1
        asyncio.get_running_loop().call_soon(busy, self.seconds)
        return True

    async def run(self) -> None:
        self.pace.wake()
        while self.left:
            self.bursts.append(0)
            await asyncio.sleep(0)


@on_loop
async def test_cheap_steps_come_in_ever_longer_bursts() -> None:
    steps = Steps(300)
    await steps.run()
    assert sum(steps.bursts) == 300
    assert max(steps.bursts) > 10


@on_loop
async def test_what_a_step_leads_to_shortens_the_bursts() -> None:
    steps = Steps(40, seconds=TURN_S / 2)
    await steps.run()
    # Two fill a turn, and what is more shows only afterwards.
    assert steps.bursts[0] == FIRST
    assert max(steps.bursts[1:]) <= 3


@on_loop
async def test_what_was_learned_stays_however_long_the_loop_takes_before_the_next_wake_is_served() -> None:
    steps = Steps(600)
    await steps.run()
    await soon(lambda: steps.pace._scheduled is None)
    learned = steps.pace._burst
    steps.left, steps.bursts = learned, []
    asyncio.get_running_loop().call_soon(busy, 2 * TURN_S)
    await steps.run()
    assert steps.bursts == [learned]


@on_loop
async def test_other_work_gets_a_turn_between_the_bursts() -> None:
    steps = Steps(100, seconds=TURN_S / 4)
    turns = []

    async def other() -> None:
        while steps.left:
            turns.append(time.perf_counter())
            await asyncio.sleep(0)

    await asyncio.gather(steps.run(), other())
    assert len(turns) > 20


@on_loop
async def test_it_rests_when_nothing_is_left_and_wakes_again() -> None:
    steps = Steps(1)
    await steps.run()
    for left in (3, 1):
        steps.left = left
        steps.pace.wake()
        steps.pace.wake()
        await soon(lambda: not steps.left)


def test_lanes_take_turns_and_each_keeps_its_order() -> None:
    lanes: Lanes[int] = Lanes()
    for item in range(4):
        lanes.put("long", item)
    lanes.put("short", 10)
    assert [lanes.take() for _ in range(6)] == [0, 10, 1, 2, 3, None]
    lanes.put("short", 11)
    assert lanes.take() == 11
