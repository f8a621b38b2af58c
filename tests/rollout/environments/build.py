"""What the environment tests are made of: a fake environment, its guard, a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from protocols.fields import Budget, Record, Times, Turn
from rollout.environments.answer import End
from rollout.environments.base import Context, Environment, Rewards, Step, TurnResult
from rollout.environments.guard import Guard, Patience
from rollout.trajectory.trajectory import Trajectory
from tests.rollout.build import MODEL, group, ids, spec

PATIENCE = Patience(5.0, 5.0, 5.0)
TURN = TurnResult(
    Turn(index=0, start=3, length=2, finish_reason="stop"), ids(7, 8), np.array([-1.0, -2.0], np.float32), 5
)


def context() -> Context:
    async def ask(turn: TurnResult) -> Any:
        raise AssertionError(f"nobody answers {turn}")

    return Context(
        trajectory_id="t",
        group_id="g",
        sample_index=0,
        seed=1,
        prompt=ids(1, 2, 3),
        vocab_size=MODEL.vocab_size,
        max_context=64,
        ask=ask,
    )


def draft() -> Record:
    return Trajectory(spec(group()), MODEL).to_record(End("env_done"), Times(), 0.0, Rewards())


def guarded(make: Callable[[], Any], patience: Patience = PATIENCE, **budget: Any) -> Guard:
    return Guard("t", make, vocab_size=MODEL.vocab_size, budget=Budget(**budget), patience=patience)


async def opened(make: Callable[[], Any], patience: Patience = PATIENCE, **budget: Any) -> Guard:
    guard = guarded(make, patience, **budget)
    assert not isinstance(await guard.open(context, ()), End)
    return guard


class Fake(Environment):
    """Records what is called; `behave` says what each method does."""

    def __init__(self, **behave: Callable[..., Any]) -> None:
        self.behave = behave
        self.calls: list[str] = []

    async def reset(self, context: Context) -> Any:
        return await self._do("reset", context)

    async def step(self, turn: TurnResult) -> Any:
        return await self._do("step", turn, default=Step())

    async def finish(self, record: Record) -> Any:
        return await self._do("finish", record)

    async def close(self) -> Any:
        return await self._do("close")

    async def _do(self, name: str, *args: Any, default: Any = None) -> Any:
        self.calls.append(name)
        result = self.behave[name](*args) if name in self.behave else default
        return await result if asyncio.iscoroutine(result) else result


async def for_ever(*_args: Any) -> None:
    await asyncio.Event().wait()


def raise_(error: BaseException) -> Callable[..., Any]:
    def behave(*_args: Any) -> None:
        raise error

    return behave
