"""The command with its engine in a process of its own: served, updated, drained, and told of its death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from rollout.command.cli import parse
from tests import rigs
from tests.rollout.raw_client import RawClient, group
from tests.rollout.workers import WorkerProcess, eventually


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rigs.write_rand(tmp_path_factory.mktemp("rand"))


@contextmanager
def running(checkpoint: Path, folder: Path) -> Iterator[tuple[WorkerProcess, psutil.Process, RawClient]]:
    """Worker, its engine, and a client that has said hello."""
    arguments = ("--weights", str(checkpoint), "--max-running", "8", "--engine-process", "process")
    worker = WorkerProcess("rollout", *arguments, folder=folder)
    try:
        worker.wait_ready(120)
        (engine,) = psutil.Process(worker.process.pid).children(recursive=True)
        with RawClient(worker.address) as client:
            client.hello(timeout=30)
            yield worker, engine, client
        eventually(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
    finally:
        worker.kill()


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_a_process_of_its_own_where_a_step_must_not_wait() -> None:
    def in_process(*arguments: str) -> bool:
        return parse(["--weights", "w", *arguments]).in_process

    assert not in_process()
    assert in_process("--device", "cuda")
    assert in_process("--engine-process", "process")
    assert not in_process("--device", "cuda", "--engine-process", "thread")


def test_a_worker_serves_updates_and_drains(checkpoint: Path, tmp_path: Path) -> None:
    greedy = {"temperature": 0.0}
    with running(checkpoint, tmp_path) as (worker, engine, client):
        assert has_torch(engine.pid)
        assert not has_torch(worker.process.pid)
        assert "cpu, in a process of its own" in worker.log
        assert f"process {engine.pid} builds the engine" in worker.log
        client.call("submit", batch_id="a", groups=[group("a", n=2, max_tokens=5, sampling=greedy)])
        first, second = (client.record(30)["segments"][0] for _ in range(2))
        np.testing.assert_array_equal(first["token_ids"], second["token_ids"])
        scored = client.call("score", sequences=[first["token_ids"]], sampling=greedy, timeout=30)
        np.testing.assert_allclose(scored["logprobs"]["processed"][0][3:], first["logprobs"][3:], atol=1e-4)
        other = str(rigs.write_rand(tmp_path / "other", rigs.RandModel(seed=1)))
        prepared = client.call("prepare_weights", update_id="u", path=other, version=7, timeout=30)
        assert prepared["type"] == "weights_prepared"
        committed = client.call("commit_weights", update_id="u", version=7, drain_timeout_s=10.0, timeout=30)
        assert committed["type"] == "weights_committed"

        # Ctrl-C in a terminal reaches both.
        client.call("submit", batch_id="b", groups=[group("b", max_tokens=1000, sampling=greedy)])
        eventually(lambda: client.call("status")["engine"]["running"] == 1)
        os.kill(engine.pid, signal.SIGINT)
        worker.signal(signal.SIGINT)
        record = client.record(60)
        assert (record["status"], record["segments"][0]["weight_versions"].tolist()) == ("truncated", [[7, 1000]])
        assert worker.wait() == 0
        assert "did not stop in time" not in worker.log


def test_the_death_of_the_engine_ends_what_runs_and_the_worker(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path) as (worker, engine, client):
        client.call("submit", batch_id="a", groups=[group("a", n=12, max_tokens=3000)])
        eventually(lambda: client.call("status")["engine"]["running"] == 8)
        engine.kill()
        records = [client.record(30) for _ in range(12)]
        assert {record["trajectory_id"] for record in records} == {f"a.{i}" for i in range(12)}
        assert {(record["status"], record["error"]["code"]) for record in records} == {("failed", "engine_dead")}
        assert worker.wait() == 1
        assert "the engine process was killed by signal 9 (Killed)" in worker.log
