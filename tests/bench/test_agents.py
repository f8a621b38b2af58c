"""Replayed agents wait for their tools, and are otherwise what was asked for."""

from __future__ import annotations

import random

import pytest

from bench.agents import replay
from bench.environment import PLUGIN
from bench.workloads import Turn, Workload, jobs
from rollout.client import RolloutClient
from tests.rollout.workers import served, worker

WORKLOAD = Workload("agents", ((Turn(5, 3), Turn(2, 4), Turn(3, 2)), (Turn(4, 2), Turn(2, 2))), samples=2)


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_a_replay_through_a_worker(wait_s: float) -> None:
    with worker(what=served(env=(PLUGIN,))) as thread, RolloutClient(thread.address) as client:
        outcome = replay(client, WORKLOAD, wait_s)
    assert (outcome.trajectories, outcome.sampled) == (4, 2 * (9 + 4))
    assert outcome.wall_s >= outcome.longest_wait_s
    assert 0 <= outcome.waited < 1
    if wait_s:
        draws = [(random.Random(f"{job.seed}.{job.sample}"), len(job.turns)) for job in jobs(WORKLOAD, 0)]
        drawn = [sum(chance.expovariate(1 / wait_s) for _ in range(turns)) for chance, turns in draws]
        assert outcome.longest_wait_s >= max(drawn)


def test_what_is_not_as_asked_for_is_an_error() -> None:
    long = Workload("agents", ((Turn(5, 3), Turn(20_000, 4)),), samples=1)
    with (
        worker(what=served(env=(PLUGIN,))) as thread,
        RolloutClient(thread.address) as client,
        pytest.raises(RuntimeError, match="not what was asked for"),
    ):
        replay(client, long, wait_s=0.0)
