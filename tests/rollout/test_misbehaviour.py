"""Many environments that misbehave at random, beside one engine: as many records, in bounded time."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.handles.thread import ThreadEngine
from protocols.fields import Record
from rollout.environments.base import Context, Environment, Step, TurnResult
from rollout.environments.guard import Patience
from rollout.generation.async_engine import AsyncEngine
from rollout.trajectory.rollout import Rollout
from tests.fake_runner import FakeRunner, FakeWeights
from tests.rollout.build import MODEL, group, run, spec

FAULTS = ("raise", "exit", "interrupt", "none", "garbage", "nan", "huge", "hang", "block", "bad id")
EXPECTED = {
    None: ("completed", "env_done"),
    "huge": ("truncated", "context_overflow"),
    "hang": ("truncated", "tool_deadline"),
    "block": ("truncated", "tool_deadline"),
}


def misbehave(fault: str, release: threading.Event) -> Any:
    if fault == "raise":
        raise ValueError("on purpose")
    if fault == "exit":
        raise SystemExit(3)
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault == "block":
        release.wait(60)
    answers: dict[str, Any] = {
        "none": None,
        "garbage": {"observation": [1]},
        "nan": Step(reward=float("nan")),
        "huge": Step(observation=np.zeros(2**19, np.int32)),
        "bad id": Step(observation=[10**6]),
        "block": Step(),
    }
    return answers[fault]


def environment(fault: str | None, at: int, release: threading.Event) -> Callable[[], Environment]:
    class Async(Environment):
        async def reset(self, context: Context) -> None:
            self.context = context

        async def step(self, turn: TurnResult) -> Step:
            if turn.index == at and fault is not None:
                if fault == "hang":
                    await asyncio.Event().wait()
                return misbehave(fault, release)
            return Step(observation=[30], done=turn.index == 2)

        async def finish(self, record: Record) -> float:
            return float(len(record.segments[0].turns))

    class Blocking(Async):
        def step(self, turn: TurnResult) -> Step:  # type: ignore[override]
            if turn.index == at and fault is not None:
                return misbehave(fault, release)
            return Step(observation=[30], done=turn.index == 2)

    return Async if fault == "hang" or (fault != "block" and at % 2) else Blocking


async def play_all(count: int, seed: int) -> None:
    choice = random.Random(seed)
    faults = [choice.choice((None, *FAULTS)) for _ in range(count)]
    release = threading.Event()
    runner = FakeRunner(num_blocks=256)
    engine = AsyncEngine(
        ThreadEngine(Engine(runner, EngineConfig(max_running=64, max_context=64)), FakeWeights(runner))
    )
    await engine.start()
    rollouts = [
        Rollout(
            spec(
                group(sampling={"max_tokens": 4}, budget={"tool_deadline_s": 1.0, "on_length": "continue"}),
                trajectory_id=f"t{i}",
                order=i,
            ),
            engine=engine,
            environment=environment(fault, choice.randrange(3), release),
            model=MODEL,
            on_turn=print,
            patience=Patience(5.0, 5.0, 1.0),
        )
        for i, fault in enumerate(faults)
    ]
    began = time.monotonic()
    records = await asyncio.gather(*(rollout.run() for rollout in rollouts))
    assert time.monotonic() - began < 60
    release.set()
    for record, fault in zip(records, faults, strict=True):
        expected = EXPECTED.get(fault, ("failed", "env_error"))
        if expected != (record.status, record.finish_reason):
            # Under load a healthy thread may miss its deadline of 1 s, and nothing else.
            assert record.finish_reason == "tool_deadline"
        segment = record.segments[0]
        assert bool(segment.loss_mask.any()) == (record.status != "failed")
        if record.status == "completed":
            assert record.reward == 3.0
    async with asyncio.timeout(10):
        while engine.stats.running or engine.stats.waiting or engine.stats.blocks_used:  # noqa: ASYNC110 (its last report is on its way)
            await asyncio.sleep(0.01)
    assert await engine.close(10)


def test_a_hundred_misbehave(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    run(play_all(100, seed=1))


@pytest.mark.stress
@pytest.mark.parametrize("repeat", range(5))
def test_a_thousand_misbehave(repeat: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    run(play_all(1000, seed=repeat))
    waited = time.monotonic() + 30
    while any(thread.name == "environment" for thread in threading.enumerate()):
        assert time.monotonic() < waited, "threads of environments are left over"
        time.sleep(0.01)
