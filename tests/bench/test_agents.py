"""Replayed agents wait for their tools, each as long as it was drawn, and are otherwise what was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from bench.agents import PLUGIN, replay, waits
from bench.workloads import Turn, Workload, jobs
from rollout.client import RolloutClient
from tests.rollout.workers import served, worker

WORKLOAD = Workload("agents", (((Turn(5, 3), Turn(2, 4), Turn(3, 2))), (Turn(4, 2), Turn(2, 2))), samples=2)


def test_waits_are_exponential_and_the_same_everywhere() -> None:
    drawn = np.array([waits(1.0, seed, sample, 50) for seed in range(20) for sample in range(4)])
    assert waits(1.0, 3, 1, 50) == drawn[3 * 4 + 1].tolist()
    assert abs(drawn.mean() - 1.0) < 0.1
    assert abs(drawn.std() - 1.0) < 0.15
    assert len(np.unique(drawn)) == drawn.size


def test_a_replay_through_a_worker() -> None:
    with worker(what=served(env=(PLUGIN,))) as thread, RolloutClient(thread.address) as client:
        outcome = replay(client, WORKLOAD, wait_s=0.02)
    drawn = [sum(waits(0.02, job.seed, job.sample, len(job.turns))[:-1]) for job in jobs(WORKLOAD, 0)]
    assert (outcome.trajectories, outcome.sampled) == (4, 2 * (9 + 4))
    assert outcome.longest_wait_s >= max(drawn)
    assert outcome.wall_s >= max(drawn)
    assert 0 < outcome.waited < 1


def test_what_is_not_as_asked_for_is_an_error() -> None:
    long = Workload("agents", ((Turn(5, 3), Turn(20_000, 4)),), samples=1)
    with (
        worker(what=served(env=(PLUGIN,))) as thread,
        RolloutClient(thread.address) as client,
        pytest.raises(RuntimeError, match="not what was asked for"),
    ):
        replay(client, long, wait_s=0.0)
