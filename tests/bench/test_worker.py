"""The workloads through a worker of its own process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.comparison import FIELDS
from bench.environment import PLUGIN
from bench.worker import WorkerDriver, _lengths_ok, main
from bench.workloads import Job, Turn, Workload
from rollout.client import AsyncRolloutClient
from rollout.local import local_worker

FLAT = Workload("flat", 3 * ((Turn(9, 4),),), temperature=1.0, short=2)
AGENTS = Workload("agents", ((Turn(20, 5), Turn(3, 6), Turn(2, 4)), (Turn(8, 3), Turn(4, 2))), samples=2, apart=True)


@pytest.fixture(scope="module")
def address(tiny: Path) -> Iterator[str]:
    options: dict[str, Any] = {"max_running": 8, "max_step_tokens": 64, "max_context": 128, "env": [PLUGIN]}
    with local_worker(tiny, **options) as worker:
        yield worker.address


@pytest.mark.parametrize("remote", [False, True], ids=["environment", "continue"])
def test_every_turn_has_its_length(address: str, remote: bool) -> None:
    drive = WorkerDriver(AsyncRolloutClient(address), remote)
    try:
        for workload in (FLAT, AGENTS):
            for seed in (0, 1):
                run = drive(workload, seed)
                assert run.lengths_ok
                assert run.wall > 0
                assert run.counters["sampled_tokens_total"] == workload.sampled_tokens
    finally:
        drive.close()


def test_a_running_worker_is_measured_and_written_down(address: str, tiny: Path, tmp_path: Path) -> None:
    options = ["--shrink", "128", "--runs", "1", "--json-dir", str(tmp_path), "--dtype", "float32", "--seed", "5"]
    main(["--weights", str(tiny), "--workload", "C", "grpo", "--address", address, "--turns", "continue", *options])
    results = [json.loads(file.read_text()) for file in sorted((tmp_path / "rollout-worker-zmq").iterdir())]
    assert [result["workload"] for result in results] == ["C_div128", "grpo_div128"]
    for result in results:
        assert set(FIELDS) <= result.keys()
        assert (result["driver"], result["forced_length_ok"]) == ("zmq", True)
        assert "trajectories_s" in results[1]["metrics"]


def test_what_a_running_worker_cannot_change_is_refused(tiny: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--weights", str(tiny), "--workload", "C", "--address", "tcp://127.0.0.1:1", "--kv-tokens", "2048"])


def test_a_worker_is_started_where_none_is_named(tiny: Path, tmp_path: Path) -> None:
    options = ["--shrink", "128", "--runs", "1", "--max-step-tokens", "256", "--json-dir", str(tmp_path)]
    main(["--weights", str(tiny), "--workload", "code_localization", "--wait", "0.01", *options])
    (file,) = (tmp_path / "rollout-worker-zmq").iterdir()
    result = json.loads(file.read_text())
    assert result["forced_length_ok"]
    assert result["settings"]["max_running"] == 128 // 8  # two sessions of eight samples
    assert result["settings"]["kv_tokens"] > 0
    assert (result["settings"]["admission"], result["settings"]["wait"]) == ("whole", 0.01)
    assert result["counters"][0]["cached_prompt_tokens_total"] > 0


def test_a_turn_that_is_not_as_forced_is_noticed() -> None:
    job = Job(0, 0, (Turn(4, 3), Turn(2, 5)), 0)
    turns = [SimpleNamespace(length=3), SimpleNamespace(length=5)]
    assert _lengths_ok(SimpleNamespace(ok=True, turns=turns), job)  # type: ignore[arg-type]
    assert not _lengths_ok(SimpleNamespace(ok=False, turns=turns), job)  # type: ignore[arg-type]
    assert not _lengths_ok(SimpleNamespace(ok=True, turns=turns[:1]), job)  # type: ignore[arg-type]
