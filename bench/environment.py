"""The environment of the measured workloads: turns of forced lengths, handed to the worker one at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from bench.workloads import Job, Turn
from protocols import fields
from rollout.environments.base import Context, Environment, Step, TurnResult

NAME = "forced"
PLUGIN = f"{NAME}=bench.environment:ForcedTurns"
"""For `--env` of a worker."""


def forced(group: Sequence[Job], wait: float) -> fields.Environment:
    """What a submit names to have a group's jobs played. wait: mean seconds before an answer."""
    turns = [[[turn.appended, turn.sampled] for turn in job.turns] for job in group]
    return fields.Environment(name=NAME, config={"turns": turns, "seed": group[0].seed, "wait": wait})


class ForcedTurns(Environment):
    """config: `turns`, [appended, sampled] by sample; `seed`, the group's; `wait`, mean seconds before an answer."""

    on_length = "continue"
    fixed_turns = True

    async def reset(self, context: Context) -> None:
        turns = tuple(Turn(*turn) for turn in context.config["turns"][context.sample_index])
        self._job = Job(0, context.sample_index, turns, context.config["seed"])
        self._vocab_size = context.vocab_size
        self._wait = context.config["wait"]
        self._chance = random.Random(f"{self._job.seed}.{context.sample_index}")

    async def step(self, turn: TurnResult) -> Step:
        if self._wait:
            await asyncio.sleep(self._chance.expovariate(1 / self._wait))
        following = turn.index + 1
        if following == len(self._job.turns):
            return Step(done=True)
        observation = self._job.appended(following, self._vocab_size)
        return Step(observation=observation, max_tokens=self._job.turns[following].sampled)
