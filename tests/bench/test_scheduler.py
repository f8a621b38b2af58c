"""What `bench.scheduler` times: its trajectories go through their turns, and both kinds of work are measured."""

from __future__ import annotations

import numpy as np
import pytest

from bench.scheduler import OBSERVATION, TURN, TURNS, InstantRunner, Trajectories, Work, measure
from engine.config import EngineConfig
from engine.engine import Engine


def test_a_trajectory_comes_back_with_what_it_sampled_until_another_takes_its_place() -> None:
    engine = Engine(InstantRunner(200, 1), EngineConfig(max_running=1, max_step_tokens=512, max_context=1024))
    trajectories = Trajectories(1, 64, TURN)
    request = trajectories.begin(TURN)
    for turn in range(TURNS):
        engine.add(request)
        ended = []
        while not ended:
            ended = engine.step()
        assert ended[0].cached_tokens == (len(request.token_ids) - OBSERVATION - 1) // 16 * 16 * (turn > 0)
        before, request = request, trajectories.after(ended[0])
        if turn + 1 < TURNS:
            known = np.concatenate((before.token_ids, ended[0].token_ids))
            np.testing.assert_array_equal(request.token_ids[: len(known)], known)
            assert request.trajectory == before.trajectory
    assert request.trajectory != before.trajectory
    assert len(request.token_ids) == 32


@pytest.mark.parametrize("work", ["decode", "turns"])
def test_both_kinds_of_work_are_measured(work: Work) -> None:
    result = measure(work, rows=8, context=64, steps=20)
    assert (result.work, result.rows, result.steps) == (work, 8, 20)
    assert 0 < result.median_us <= result.p99_us
    assert result.us_per_row == result.mean_us / 8
    assert result.yardsticks > 0
