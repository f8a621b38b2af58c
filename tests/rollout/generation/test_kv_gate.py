"""Turns that wait for room before the engine: in order, ended like any other, and never for good."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from engine.config import BLOCK_SIZE
from engine.handle import ReleaseKv, Submit
from engine.request import Completion, Failure, Request
from rollout.generation.async_engine import AsyncEngine
from rollout.generation.kv_budget import Candidate, KvBudget
from rollout.generation.kv_gate import KvGate
from tests.rollout.stub_engine import StubEngine, completed
from tests.rollout.workers import soon

PROMPT = 160


class Gate:
    """A gate over a stub that answers nothing by itself, and trajectories `t0`, `t1`, ... that have started."""

    def __init__(self, stub: StubEngine, engine: AsyncEngine, count: int) -> None:
        self.stub = stub
        self.rooms = 0
        self.budget = KvBudget(40 * BLOCK_SIZE)
        self.gate = KvGate(engine, self.budget, self._room)
        for i in range(count):
            self.budget.start(Candidate(f"t{i}", "g", "k", PROMPT, 10**6))

    def _room(self) -> None:
        self.rooms += 1

    def ask(self, number: int, length: int = PROMPT, **changes: object) -> asyncio.Task[Completion]:
        request = Request(
            f"t{number}/0", np.zeros(length, np.int32), 8, order=number, trajectory=f"t{number}", goes_on=True
        )
        return asyncio.ensure_future(self.gate.generate(replace(request, **changes)))  # type: ignore[arg-type]

    async def submitted(self) -> list[str]:
        """What has come to the engine, once everybody had a turn."""
        for _ in range(5):
            await asyncio.sleep(0)
        return list(self.stub.held)


def drive(test: Callable[[Gate], Awaitable[None]], count: int = 3) -> None:
    async def main() -> None:
        stub = StubEngine(lambda _: None)
        engine = AsyncEngine(stub)
        await engine.start()
        await test(Gate(stub, engine, count))

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_turn_waits_until_older_trajectories_leave_room() -> None:
    async def test(gate: Gate) -> None:
        tasks = [gate.ask(i, PROMPT + 200) for i in (2, 1, 0)]
        assert await gate.submitted() == ["t0/0", "t1/0"] or gate.gate.num_waiting
        waiting = gate.gate.num_waiting
        assert waiting >= 1
        assert "t2/0" not in gate.stub.held
        gate.stub.finish(completed(gate.stub.held["t0/0"]))
        await tasks[2]
        gate.gate.release_kv("t0")
        gate.budget.end("t0", tells=False)
        for name in ("t1", "t2"):
            while f"{name}/0" not in await gate.submitted():
                pass
            gate.stub.finish(completed(gate.stub.held[f"{name}/0"]))
            gate.gate.release_kv(name)
        assert [(await task).finish_reason for task in tasks] == ["stop"] * 3
        assert gate.gate.num_waiting == 0

    drive(test)


async def one_waits(gate: Gate) -> asyncio.Task[Completion]:
    """`t0` has nearly all of the pool, and `t1` waits."""
    first = gate.ask(0, PROMPT + 400)
    assert await gate.submitted() == ["t0/0"]
    second = gate.ask(1, PROMPT + 100)
    assert await gate.submitted() == ["t0/0"]
    assert gate.gate.num_waiting == 1
    assert not first.done()
    return second


@pytest.mark.parametrize("reason", ["abort_client", "turn_deadline"])
def test_a_turn_that_waits_ends_with_nothing_when_it_is_aborted(reason: str) -> None:
    async def test(gate: Gate) -> None:
        second = await one_waits(gate)
        gate.gate.abort(("t1/0", "unknown"), reason)  # type: ignore[arg-type]
        completion = await second
        assert completion.finish_reason == reason
        assert len(completion.token_ids) == len(completion.logprobs["processed"]) == 0
        assert await gate.submitted() == ["t0/0"]
        assert gate.gate.num_waiting == 0

    drive(test, 2)


def test_a_turn_in_the_engine_is_aborted_there() -> None:
    async def test(gate: Gate) -> None:
        task = gate.ask(0)
        assert await gate.submitted() == ["t0/0"]
        gate.gate.abort(("t0/0",), "abort_client")
        assert (await task).token_ids.tolist() == [5, 6]

    drive(test)


def test_a_caller_that_is_cancelled_while_it_waits_is_forgotten() -> None:
    async def test(gate: Gate) -> None:
        second = await one_waits(gate)
        second.cancel()
        assert await gate.submitted() == ["t0/0"]
        assert gate.gate.num_waiting == 0
        gate.gate.release_kv("t0")
        assert await gate.submitted() == ["t0/0"]

    drive(test, 2)


def test_a_dead_engine_keeps_nobody_waiting() -> None:
    async def test(gate: Gate) -> None:
        second = await one_waits(gate)
        gate.stub.report(died=Failure("engine_dead", "gone"))
        completion = await second
        assert completion.error is not None
        assert completion.error.code == "engine_dead"

    drive(test, 2)


def test_who_stays_away_for_long_makes_room_for_others_to_start() -> None:
    async def test(gate: Gate) -> None:
        for wait, rooms in ((0.0, 0), (5.0, 1)):
            task = gate.ask(0, expected_wait=wait)
            await gate.submitted()
            gate.stub.finish(completed(gate.stub.held["t0/0"]))
            await task
            assert gate.rooms == rooms

    drive(test, 1)


def test_the_end_of_a_trajectory_reaches_the_engine_once_and_only_if_it_held_anything() -> None:
    async def test(gate: Gate) -> None:
        for number, goes_on in ((0, True), (1, False)):
            task = gate.ask(number, goes_on=goes_on)
            await gate.submitted()
            gate.stub.finish(completed(gate.stub.held[f"t{number}/0"]))
            await task
            for _ in range(2):
                gate.gate.release_kv(f"t{number}")
        await gate.submitted()
        assert [c for c in gate.stub.commands if not isinstance(c, Submit)] == [ReleaseKv(("t0",))]
        assert gate.rooms == 4

    drive(test)


def test_who_was_not_started_through_the_budget_passes() -> None:
    async def test(gate: Gate) -> None:
        await one_waits(gate)
        gate.ask(9, PROMPT + 4000)
        assert await gate.submitted() == ["t0/0", "t9/0"]

    drive(test, 2)


def test_an_abort_between_room_and_taking_it_is_not_lost() -> None:
    async def test(gate: Gate) -> None:
        second = await one_waits(gate)
        gate.gate.release_kv("t0")
        gate.gate.abort(("t1/0",), "abort_client")
        completion = await second
        assert completion.finish_reason == "abort_client"
        assert await gate.submitted() == ["t0/0"]
        assert gate.gate.num_waiting == 0

    drive(test, 2)


def test_nobody_waits_for_an_environment_that_waits_for_him() -> None:
    async def test(gate: Gate) -> None:
        second = await one_waits(gate)
        gate.stub.finish(completed(gate.stub.held["t0/0"]))
        await soon(lambda: gate.gate.num_waiting == 0)
        assert "t1/0" in await gate.submitted()
        assert gate.rooms == 1
        gate.stub.finish(completed(gate.stub.held["t1/0"]))
        assert (await second).finish_reason == "stop"

    drive(test, 2)


def test_one_that_was_kept_meanwhile_holds_up_nobody_who_started_before_it_came_back() -> None:
    async def test(gate: Gate) -> None:
        second = await one_waits(gate)
        gate.budget.end("t0", tells=False)
        gate.budget.start(Candidate("t0", "g", "k", PROMPT + 400, 10**6))
        again = gate.ask(0, PROMPT + 400, id="t0/1")
        gate.stub.finish(completed(gate.stub.held["t0/0"]))
        while "t1/0" not in await gate.submitted():
            pass
        gate.stub.finish(completed(gate.stub.held["t1/0"]))
        assert (await second).finish_reason == "stop"
        gate.gate.release_kv("t1")
        while "t0/1" not in await gate.submitted():
            pass
        assert not again.done()

    drive(test, 2)


def test_one_that_starts_with_a_question_holds_up_nobody() -> None:
    async def test(gate: Gate) -> None:
        gate.budget.start(Candidate("t9", "h", "k", PROMPT + 400, 10**6))
        gate.budget.start(Candidate("t1", "g", "k", PROMPT, 10**6))
        late = gate.ask(1, PROMPT + 100)
        assert await gate.submitted() == []
        await soon(lambda: "t1/0" in gate.stub.held)
        assert not late.done()

    drive(test, 0)
