"""W&B in its own process: a real offline run read back, and children that behave as badly as they can."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.client import RolloutClient
from rollout.metrics.feed import Feed, close_all
from rollout.metrics.row import ROUND_AXIS, TIME_AXIS, Row
from rollout.metrics.wandb_run import WandbOptions, WandbRun
from tests.rollout.metrics import wandb_file
from tests.rollout.workers import WorkerProcess, eventually

OPTIONS = WandbOptions("project", mode="offline", name="a name", config={"max_running": 8})
NEVER_READS = "import time; time.sleep(1000)"
HANGS_AT_THE_END = "import sys, time; sys.stdin.read(); time.sleep(1000)"
DIES = "import os, sys; sys.stdin.readline(); sys.stdin.readline(); os._exit(3)"
GONE_AT_ONCE = "raise SystemExit(1)"


def round_row(step: int, **values: float) -> Row:
    return Row("round", time.time(), {ROUND_AXIS: step, **{f"rollout/{name}": value for name, value in values.items()}})


def gauges_row(time_s: float, running: int) -> Row:
    return Row("gauges", time_s, {TIME_AXIS: time_s, "engine/num_requests_running": running})


def run_file(folder: Path) -> Path:
    (found,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    return found


def logged(folder: Path) -> list[dict[str, Any]]:
    return wandb_file.rows(run_file(folder))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs of this test are."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path


def test_a_real_offline_run_holds_every_row_on_its_own_axis(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = WandbRun(replace(OPTIONS, group="trainer-7", resume_id="again"))
    run.write(gauges_row(50.0, 3))
    run.write(round_row(12, tokens_per_s=100.0))
    run.write(round_row(11, tokens_per_s=math.nan, round_time_s=math.inf))
    run.write(gauges_row(55.0, 4))
    run.write(round_row(13, tokens_per_s=300.0))
    run.close()
    assert not warnings(caplog)
    rows = logged(folder)
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4], "a late round does not take W&B's own step back"
    rounds = [row for row in rows if ROUND_AXIS in row]
    assert [row[ROUND_AXIS] for row in rounds] == [12, 11, 13]
    assert (rounds[0]["rollout/tokens_per_s"], rounds[2]["rollout/tokens_per_s"]) == (100.0, 300.0)
    assert "engine/num_requests_running" not in rounds[0]
    gauges = [row for row in rows if TIME_AXIS in row]
    assert [(row[TIME_AXIS], row["engine/num_requests_running"]) for row in gauges] == [(50.0, 3), (55.0, 4)]
    assert wandb_file.axes(run_file(folder)) == {
        "rollout/*": ROUND_AXIS,
        "engine/*": TIME_AXIS,
        "env/*": TIME_AXIS,
        "weights/*": TIME_AXIS,
        "mem/*": TIME_AXIS,
        "wire/*": TIME_AXIS,
    }
    begun = next(record.run for record in wandb_file.records(run_file(folder)) if record.HasField("run"))
    assert (begun.project, begun.display_name, begun.job_type) == ("project", "a name", "rollout")
    assert (begun.run_group, begun.run_id) == ("trainer-7", "again")
    assert ("max_running", "8") in [(item.key, item.value_json) for item in begun.config.update]


def test_a_worker_that_ends_has_the_same_numbers_there_and_in_its_file(folder: Path) -> None:
    metrics = folder / "m.jsonl"
    options = ("--metrics-file", str(metrics), "--wandb-project", "p", "--wandb-mode", "offline")
    worker = WorkerProcess("tests.rollout.stub_worker", *options, "--metrics-interval", "0.2", folder=folder)
    try:
        worker.wait_ready()
        with RolloutClient(worker.address) as client:
            for step in (30, 31):
                client.submit(client.group([1, 2], 4, max_tokens=step), step=step).results()
            client.update_weights(folder, 2, mode="abort")
        # However slow the machine: what is under test is the end, not the beginning.
        eventually(lambda: "an offline run in" in worker.log, 90)
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    finally:
        worker.kill()
    written = [json.loads(line) for line in metrics.read_text().splitlines()]
    expected = [{name: row[name] for name in row if name not in ("kind", "time")} for row in written]
    found = [{name: row[name] for name in row if not name.startswith("_")} for row in logged(folder)]
    assert found == expected
    assert [row[ROUND_AXIS] for row in found if ROUND_AXIS in row] == [30, 31]
    assert (found[-1]["weights/version"], found[-1]["weights/bytes"]) == (2, 1000)
    assert "did not finish" not in worker.log


def test_a_worker_that_is_killed_loses_no_row(folder: Path) -> None:
    program = (
        "import sys, time, tests.rollout.metrics.test_wandb_run as t\n"
        "run = t.WandbRun(t.OPTIONS)\n"
        "for step in range(20): run.write(t.round_row(step, tokens_per_s=1.0))\n"
        "print('written', flush=True)\n"
        "time.sleep(1000)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"written\n"
    (child,) = psutil.Process(worker.pid).children()
    os.killpg(worker.pid, signal.SIGKILL)
    worker.communicate()
    eventually(lambda: not child.is_running(), 60)
    assert [row[ROUND_AXIS] for row in logged(folder)] == list(range(20))


def make(code: str) -> Callable[[], WandbRun]:
    return lambda: WandbRun(OPTIONS, child=("-c", code))


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


@pytest.mark.parametrize("code", [NEVER_READS, HANGS_AT_THE_END], ids=["never reads", "hangs at the end"])
def test_a_child_that_hangs_costs_rows_and_no_time(code: str, caplog: pytest.LogCaptureFixture) -> None:
    before = children()
    fed: Feed[Row] = Feed("W&B", make(code), capacity=100)
    began = time.monotonic()
    for step in range(20_000):
        fed.put(round_row(step, tokens_per_s=1.0))
    assert time.monotonic() - began < 5
    close_all([fed], 0.5)
    assert time.monotonic() - began < 15
    assert children() == before, "nothing is left behind"
    assert fed.dropped > 0
    assert warnings(caplog) == ["W&B did not finish in time: its last numbers may be missing"]


@pytest.mark.parametrize("code", [DIES, GONE_AT_ONCE], ids=["dies", "gone at once"])
def test_a_child_that_dies_is_told_and_the_rows_are_counted(code: str, caplog: pytest.LogCaptureFixture) -> None:
    before = children()
    fed: Feed[Row] = Feed("W&B", make(code))
    eventually(lambda: fed.put(round_row(0)) or fed.dropped > 0)  # type: ignore[func-returns-value]
    close_all([fed], 20)
    assert children() == before
    (told,) = warnings(caplog)
    assert "ended with code" in told
