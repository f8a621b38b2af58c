from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from engine.handle import EngineStats
from protocols.fields import Times, Turn
from protocols.replies import WorkerStatus
from rollout.metrics.gauges import Gauges
from rollout.metrics.names import NAMES

WIRE = {"rx_bytes": 10.0, "tx_bytes": 20.0, "queue_depth": 3.0, "credit_stalls": 4.0, "window_stalls": 9.0}

ENVIRONMENTS = {
    "processes": 3.0,
    "calls_waiting": 2.0,
    "calls_total": 4.0,
    "call_wait_s_total": 6.0,
    "no_process_total": 4.0,
    "process_deaths_total": 1.0,
}


def status(version: int = 5, environments: dict[str, float] = ENVIRONMENTS, **stats: Any) -> WorkerStatus:
    return WorkerStatus(
        id="",
        state="ready",
        boot_id="b",
        uptime_s=1.0,
        weight_version=version,
        weight_digest="d",
        trajectories_running=0,
        trajectories_waiting=0,
        results_unacknowledged=0,
        sessions=0,
        engine={name: float(value) for name, value in asdict(EngineStats(**stats)).items()},
        wire=WIRE,
        environments=environments,
    )


def turn(length: int, **times: float) -> Turn:
    return Turn(index=0, start=2, length=length, finish_reason="stop", times=Times(**times))


def test_gauges_of_now() -> None:
    found = Gauges((), 7_000_000_000).look(
        status(running=3, waiting=2, blocks_total=40, blocks_used=10, preemptions_total=6, split_steps_total=8)
    )
    assert found["engine/num_requests_running"] == 3
    assert found["engine/num_requests_waiting"] == 2
    assert found["engine/kv_cache_usage_perc"] == 0.25
    assert found["mem/free_blocks"] == 30
    assert (found["engine/preemptions"], found["engine/split_kv_steps"]) == (6, 8)
    assert found["mem/gpu_gb"] == 7.0
    assert found["weights/version"] == 5
    assert {name: found[f"wire/{name}"] for name in ("rx_bytes", "tx_bytes", "queue_depth", "credit_stalls")} == {
        name: value for name, value in WIRE.items() if name != "window_stalls"
    }


def test_how_long_tools_wait_for_a_process() -> None:
    gauges = Gauges((), 0)
    first = gauges.look(status())
    assert (first["env/processes"], first["env/calls_waiting"], first["env/process_deaths"]) == (3, 2, 1)
    assert first["env/call_wait_s_avg"] == 1.5
    assert first["env/no_process"] == 4
    later = ENVIRONMENTS | {"calls_total": 6.0, "call_wait_s_total": 7.0}
    assert gauges.look(status(environments=later))["env/call_wait_s_avg"] == 0.5
    assert "env/call_wait_s_avg" not in gauges.look(status(environments=later)), "nothing was called since"


def test_rates_are_those_since_the_look_before() -> None:
    gauges = Gauges((), 0)
    first = status(
        steps_total=10,
        sampled_tokens_total=100,
        graph_steps_total=10,
        prompt_tokens_total=1000,
        cached_prompt_tokens_total=0,
    )
    second = status(
        steps_total=20,
        sampled_tokens_total=130,
        graph_steps_total=15,
        prompt_tokens_total=1100,
        cached_prompt_tokens_total=75,
    )
    assert gauges.look(first)["engine/batch_size/mean"] == 10
    found = gauges.look(second)
    assert found["engine/batch_size/mean"] == 3
    assert found["engine/cuda_graph_hit_rate"] == 0.5
    assert found["engine/prefix_cache_hit_rate"] == 0.75


def test_nothing_is_said_of_what_did_not_happen() -> None:
    gauges = Gauges((), 0)
    gauges.look(status(steps_total=10, prompt_tokens_total=5))
    idle = gauges.look(status(steps_total=10, prompt_tokens_total=5))
    for name in ("prefix_cache_hit_rate", "cuda_graph_hit_rate", "batch_size/mean", "ttft_seconds_avg"):
        assert f"engine/{name}" not in idle
    assert "engine/kv_cache_usage_perc" not in idle, "an engine without blocks has no share of them"


def test_first_token_and_time_per_token_come_from_turns() -> None:
    gauges = Gauges((), 0)
    gauges.turn(turn(5, queue=0.25, prefill=0.75, decode=0.4, tool_wait=100.0))
    gauges.turn(turn(1, queue=3.0, prefill=0.0, decode=0.0))
    gauges.turn(turn(0, queue=1000.0))
    found = gauges.look(status())
    assert found["engine/ttft_seconds_avg"] == pytest.approx(2.0)
    assert found["engine/tpot_seconds_avg"] == pytest.approx(0.1)
    assert "engine/ttft_seconds_avg" not in gauges.look(status())


def test_weights_keep_what_the_last_update_took() -> None:
    gauges = Gauges((), 0)
    assert "weights/load_s" not in gauges.look(status())
    gauges.prepared(2.5, 1000)
    gauges.committed(0.125)
    gauges.failed()
    gauges.failed()
    for _ in range(2):
        found = gauges.look(status())
        assert (found["weights/load_s"], found["weights/paused_s"]) == (2.5, 0.125)
        assert (found["weights/bytes"], found["weights/failures"]) == (1000, 2)


def test_memory_is_that_of_the_processes_once_each_and_of_none_that_is_gone() -> None:
    mine = Gauges((os.getpid(), os.getpid()), 0).look(status())["mem/rss_gb"]
    assert 0.01 < mine < 100
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gauges = Gauges((os.getpid(), child.pid), 0)
    assert gauges.look(status())["mem/rss_gb"] > mine
    child.communicate(b"\n")
    assert gauges.look(status())["mem/rss_gb"] == pytest.approx(mine, rel=0.5)
    assert Gauges((child.pid,), 0).look(status())["mem/rss_gb"] == 0


def test_every_name_is_one_of_the_table() -> None:
    gauges = Gauges((), 0)
    gauges.turn(turn(5, queue=0.25))
    gauges.prepared(1.0, 1)
    gauges.committed(1.0)
    found = gauges.look(status(steps_total=1, prompt_tokens_total=1, blocks_total=1))
    assert found.keys() == {name for name in NAMES if not name.startswith("rollout/")}
