# ruff: noqa: ARG002
"""Environments for processes of their own: config["at"] says in which stage, config["what"] does what goes wrong."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import numpy as np

from protocols.fields import Record
from rollout.environments.base import Context, Environment, Observation, Rewards, Step, TurnResult
from tests.rollout.environments import foreign


class Odd(Environment):
    """Three turns, then done; reward: 3. It fails as `metadata` says: {"stage", "what"}."""

    isolation = "process"
    on_length = "continue"

    def reset(self, context: Context) -> Any:
        self.plan = dict(context.metadata)
        self.turns = 0
        self.folder = str(context.config.get("folder", ""))
        wrong = self._go_wrong("reset")
        return wrong if wrong != () else None

    def step(self, turn: TurnResult) -> Any:
        self.turns += 1
        print(self.plan.get("says", ""))  # not flushed: it may still be held back when others print
        wrong = self._go_wrong("step") if turn.index == self.plan.get("turn", 0) else ()
        return wrong if wrong != () else Step(observation=[30], done=turn.index == 2)

    def finish(self, record: Record) -> Any:
        wrong = self._go_wrong("finish")
        return wrong if wrong != () else float(self.turns)

    def close(self) -> None:
        self._go_wrong("close")
        if self.folder:
            with open(self.folder, "a") as file:
                file.write("closed\n")

    def _go_wrong(self, stage: str) -> Any:
        """() where nothing is wrong."""
        if self.plan.get("stage") != stage:
            return ()
        return go_wrong(self.plan["what"])


def go_wrong(what: str) -> Any:
    match what:
        case "raise":
            raise ValueError("on purpose")
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "kill":
            os.kill(os.getpid(), 9)
        case "os._exit":
            os._exit(4)
        case "hang":
            time.sleep(600)
        case "burn":
            foreign.burn()
        case "mutter and kill":
            print("last words", flush=True)
            os.kill(os.getpid(), 9)
        case "print":
            foreign.print_for_ever()
        case "none":
            return None
        case "nan":
            return Step(reward=float("nan"))
        case "2 MB":
            return Step(observation=np.zeros(2**19, np.int32))
        case "20 MB":
            return Step(observation=np.zeros(5 * 2**20, np.int32))
        case "bad id":
            return Step(observation=[10**6])
        case "own class":
            return foreign.Own()
        case "close descriptors":
            os.closerange(0, 3)
            return Step(observation=[30])
        case "close stdout":
            sys.stdout.close()
            return Step(observation=[30], done=True)
    raise AssertionError(what)


class Patient(Odd):
    """The same with asynchronous methods."""

    async def step(self, turn: TurnResult) -> Any:
        self.turns += 1
        if self.plan.get("stage") == "step" and self.plan["what"] == "hang":
            await asyncio.Event().wait()
        return Step(observation=[30], done=turn.index == 2)


class Telling(Environment):
    """What it learned, as named rewards and ids; text through the codec."""

    isolation = "process"
    on_length = "continue"
    fixed_turns = True

    async def reset(self, context: Context) -> Observation:
        self.context = context
        prompt = np.array(context.prompt) if context.tokenizer is None else context.encode("hello")
        return Observation(ids=prompt[::-1], glue=(1, 2), max_tokens=3)

    async def step(self, turn: TurnResult) -> Step:
        assert turn.finish_reason == "stop"
        return Step(
            observation=turn.token_ids,
            glue=[len(turn.logprobs)],
            opening=[9],
            branch=[1, 2],
            called=True,
            done=True,
            reward=np.float32(0.25),
            max_tokens=4,
        )

    async def finish(self, record: Record) -> Rewards:
        context = self.context
        return Rewards(
            None, {"pid": os.getpid(), "seed": context.seed, "config": context.config.get("x", 0), "len": record.wall_s}
        )


class Asking(Environment):
    isolation = "process"

    async def step(self, turn: TurnResult) -> Step:
        return Step(observation=(await self.context.ask(turn)).observation)

    def reset(self, context: Context) -> None:
        self.context = context


class Least(Environment):
    isolation = "process"

    def step(self, turn: TurnResult) -> Step:
        return Step(done=True)


def broken() -> Environment:
    raise OSError("no such game")


broken.isolation = "process"  # type: ignore[attr-defined]


class Saved(Environment):
    """Adds up what was sampled; can go on elsewhere."""

    isolation = "process"

    def reset(self, context: Context) -> Observation:
        self.sums = {"all": 0}
        return Observation(ids=context.prompt)

    def step(self, turn: TurnResult) -> Step:
        self.sums["all"] += int(turn.token_ids.sum())
        return Step(observation=[self.sums["all"]])

    def snapshot(self) -> dict[str, Any]:
        return self.sums

    def restore(self, context: Context, state: Any) -> None:
        self.sums = {"all": int(state["all"])}

    def finish(self, record: Record) -> float:
        return float(self.sums["all"])


class SavedHere(Saved):
    isolation = "worker"


class BadlySaved(SavedHere):
    def snapshot(self) -> Any:
        return self

    def restore(self, context: Context, state: Any) -> None:
        raise ValueError(f"cannot read {state}")
