"""Whole trajectories against open admission, over the real scheduler and a pool that does not hold them all."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from bench.kv_admission import Outcome, line, simulate
from bench.workloads import Turn, Workload, workloads
from rollout.generation.kv_budget import KvBudget

KV_TOKENS = 110_000
"""Of each sample: as much of what all need as the H200's pool is for eight of them."""


@cache
def runs(samples: int, wait: float = 0.0) -> dict[str, Outcome]:
    """Open, then whole knowing nothing, then whole with what that run learned."""
    work = replace(workloads()["code_localization"], samples=samples)
    kv_tokens = KV_TOKENS * samples
    kv = KvBudget(kv_tokens)
    return {
        "open": simulate(work, kv_tokens, None, wait=wait, holds=False),
        "unknown": simulate(work, kv_tokens, kv, wait=wait),
        "whole": simulate(work, kv_tokens, kv, seed=1, wait=wait),
    }


def test_whole_trajectories_compute_hardly_anything_twice() -> None:
    found = runs(1)
    assert all(outcome.lengths_ok for outcome in found.values())
    assert found["open"].computed_twice > 0.15
    assert found["whole"].computed_twice < 0.03
    assert found["unknown"].computed_twice < found["open"].computed_twice
    assert found["whole"].stats.preemptions_total == 0


def test_with_tool_waits_whole_trajectories_are_done_sooner_for_a_little_computed_twice() -> None:
    found = runs(1, wait=1.0)
    assert found["whole"].computed_twice < found["open"].computed_twice / 3
    assert found["whole"].seconds < found["open"].seconds


@pytest.mark.stress
def test_sixteen_sessions_of_eight_samples() -> None:
    found = runs(8)
    assert found["open"].computed_twice > 0.25
    assert found["unknown"].computed_twice < 0.05
    assert found["whole"].computed_twice < 0.01
    assert found["whole"].seconds < found["open"].seconds


def test_what_fits_is_not_held_back() -> None:
    """Knowing nothing, and knowing all: as many steps as without a budget."""
    work = Workload("w", 8 * ((Turn(128, 32), Turn(16, 32), Turn(16, 32)),), samples=4, prefix_cache=True)
    needed = 8 * 128 + 32 * (256 - 128 + 32)
    kv = KvBudget(needed)
    free = simulate(work, needed, None)
    for seed in range(2):
        found = simulate(work, needed, kv, seed=seed)
        assert found.stats.steps_total == free.stats.steps_total
        assert found.stats.kv_holds_dropped_total == 0


def test_a_line_tells_what_was_counted() -> None:
    work = Workload("w", ((Turn(40, 8), Turn(8, 8)),), samples=2, prefix_cache=True)
    outcome = simulate(work, 1024, KvBudget(1024))
    assert f"{outcome.stats.computed_prompt_tokens_total:,}" in line("whole", outcome)
    assert outcome.new == 48 + 8
