"""An environment whose tool runs in a forked child, for a worker of its own to import."""

from __future__ import annotations

import multiprocessing
import os
import sys

from rollout.environments.base import Context, Environment, Observation, Step, TurnResult
from tests.rollout.raw_client import RawClient


class Forking(Environment):
    on_length = "continue"

    async def reset(self, context: Context) -> Observation | None:
        self._how, self._address = str(context.config["how"]), str(context.config["address"])
        return None

    def step(self, _: TurnResult) -> Step:  # type: ignore[override]
        child = multiprocessing.get_context("fork").Process(target=tool, args=(self._how, self._address))
        child.start()
        child.join(30)
        return Step(done=True, reward=float(child.exitcode or 0))


def tool(how: str, address: str) -> None:
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(4)
    if how == "client":
        with RawClient(address) as client:
            os._exit(5 if client.hello()["type"] == "welcome" else 6)
