"""Environments that never answer, for a worker of its own to import."""

from __future__ import annotations

import asyncio
import time

from rollout.environments.base import Environment, Step, TurnResult


class Stuck(Environment):
    async def step(self, _: TurnResult) -> Step:
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue


class Blocked(Environment):
    def step(self, _: TurnResult) -> Step:  # type: ignore[override]
        time.sleep(1000)
        return Step(done=True)


class Lingering(Environment):
    async def step(self, _: TurnResult) -> Step:
        return Step(done=True, reward=0.5)

    async def close(self) -> None:
        await asyncio.sleep(1000)
