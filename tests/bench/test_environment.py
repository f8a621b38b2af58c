from __future__ import annotations

import asyncio
import importlib
from typing import Any

import numpy as np
import pytest

from bench.environment import PLUGIN, ForcedTurns, forced
from bench.workloads import Turn, Workload, jobs
from protocols.fields import Times
from protocols.fields import Turn as WireTurn
from rollout.environments.base import Context, TurnResult

VOCAB = 512


def ended(index: int) -> TurnResult:
    turn = WireTurn(
        index=index,
        start=0,
        length=1,
        finish_reason="length",
        prompt_len=1,
        cached_tokens=0,
        computed_tokens=1,
        preemptions=0,
        times=Times(),
    )
    return TurnResult(turn, np.zeros(1, np.int32), np.zeros(1, np.float32), 2)


async def never(_: TurnResult) -> Any:
    raise AssertionError("nobody is to be asked")


@pytest.mark.parametrize("wait", [0.0, 0.001])
def test_it_says_what_the_job_says_one_turn_at_a_time(wait: float) -> None:
    workload = Workload("w", ((Turn(4, 3), Turn(5, 6), Turn(7, 8)),), samples=2, apart=True)
    group = jobs(workload, 3)
    job = group[1]
    context = Context("t", "g", 1, 0, np.zeros(4, np.int32), VOCAB, 64, never, config=forced(group, wait).config)

    async def play() -> None:
        environment = ForcedTurns()
        await environment.reset(context)
        for index in (0, 1):
            step = await environment.step(ended(index))
            np.testing.assert_array_equal(step.observation, job.appended(index + 1, VOCAB))
            assert step.max_tokens == job.turns[index + 1].sampled
            assert not step.done
        assert (await environment.step(ended(2))).done

    asyncio.run(play())


def test_a_worker_finds_it_by_its_name() -> None:
    name, _, target = PLUGIN.partition("=")
    module, _, attribute = target.partition(":")
    assert name == forced(jobs(Workload("w", ((Turn(4, 3),),)), 0), 0.0).name
    assert getattr(importlib.import_module(module), attribute) is ForcedTurns
