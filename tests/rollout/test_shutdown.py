"""SIGTERM: what runs may end, what cannot comes back with what it has, and the process is gone in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rollout.__main__
from tests.rollout.raw_client import RawClient, group
from tests.rollout.workers import ROOT, WorkerProcess, eventually

GRACE = 2.0
"""Seconds that the worker may take beyond its drain timeout (ack timeout 1 s, and this machine's moods)."""
SLACK = 2.0


@contextmanager
def process(folder: Path, *arguments: str, **options: Any) -> Iterator[WorkerProcess]:
    worker = WorkerProcess("tests.rollout.stub_worker", *arguments, folder=folder, **options)
    try:
        yield worker
    finally:
        worker.kill()


def submit(client: RawClient, *groups: dict[str, Any], batch: str = "b") -> dict[str, Any]:
    return client.call("submit", batch_id=batch, groups=list(groups))


def test_a_drain_ends_what_can_end_and_gives_the_rest_back(tmp_path: Path) -> None:
    arguments = ("--seconds-per-token", "0.01", "--drain-timeout", "3", "--max-trajectories", "4")
    with process(tmp_path, *arguments) as worker, RawClient(worker.wait_ready().address) as client:
        client.hello()
        # Two end within the drain, two do not, one has not started.
        submit(
            client,
            group("short", n=2, max_tokens=100),
            group("long", n=2, max_tokens=5000),
            group("queued", max_tokens=10),
        )
        eventually(lambda: client.call("status")["trajectories_running"] == 4)
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        eventually(lambda: client.call("status")["state"] == "draining")
        error = submit(client, group("late"), batch="c")["error"]
        assert (error["code"], error["retryable"]) == ("shutting_down", True)
        records = {(record := client.record())["trajectory_id"]: record for _ in range(5)}
        assert worker.wait() == 0
        assert time.monotonic() - began < 3 + GRACE + SLACK
    queued = records["queued.0"]
    assert (queued["finish_reason"], len(queued["segments"][0]["token_ids"])) == ("abort_shutdown", 3)
    for i in range(2):
        assert records[f"short.{i}"]["status"] == "truncated"
        long = records[f"long.{i}"]
        assert (long["status"], long["finish_reason"]) == ("aborted", "abort_shutdown")
        assert 100 < len(long["segments"][0]["token_ids"]) < 2000
        assert long["segments"][0]["loss_mask"].sum() == len(long["segments"][0]["token_ids"]) - 3
    assert "Traceback" not in worker.log


def test_an_idle_worker_leaves_at_once(tmp_path: Path) -> None:
    with process(tmp_path, "--drain-timeout", "60") as worker, RawClient(worker.wait_ready().address) as client:
        client.hello()
        submit(client, group())
        client.record()
        client.event("batch_done")
        worker.signal(signal.SIGTERM)
        assert worker.wait(GRACE + SLACK) == 0


def test_a_client_that_acknowledges_nothing_delays_the_end_and_does_not_prevent_it(tmp_path: Path) -> None:
    with process(tmp_path, "--drain-timeout", "1") as worker, RawClient(worker.wait_ready().address) as client:
        client.hello()
        submit(client, group())
        client.record(ack=False)
        worker.signal(signal.SIGTERM)
        assert worker.wait(1 + GRACE + SLACK) == 0
        assert "1 results were not acknowledged" in worker.log


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    arguments = ("--seconds-per-token", "1", "--drain-timeout", "60")
    for second, code in ((signal.SIGTERM, 128 + 15), (signal.SIGINT, 128 + 2)):
        with process(tmp_path, *arguments) as worker, RawClient(worker.wait_ready().address) as client:
            client.hello()
            submit(client, group(max_tokens=1000))
            worker.signal(signal.SIGTERM)
            eventually(lambda client=client: client.call("status")["state"] == "draining")
            worker.signal(second)
            assert worker.wait(SLACK) == code


def test_a_signal_before_ready_simply_ends_it(tmp_path: Path) -> None:
    with process(tmp_path, "--load-s", "60") as worker:
        eventually(lambda: "loading" in worker.log)
        worker.signal(signal.SIGTERM)
        assert worker.wait(GRACE + SLACK) == 0
        assert "ready" not in worker.log.replace("before the worker was ready", "")
        assert "Traceback" not in worker.log


def test_a_signal_during_an_update_refuses_what_is_not_done(tmp_path: Path) -> None:
    arguments = ("--prepare-s", "60", "--drain-timeout", "60")
    with process(tmp_path, *arguments) as worker, RawClient(worker.wait_ready().address) as client:
        client.hello()
        prepare = client.send("prepare_weights", update_id="u", path="w", version=1)
        client.call("ping")
        worker.signal(signal.SIGTERM)
        assert client.reply(prepare)["error"]["code"] == "shutting_down"
        assert worker.wait(GRACE + SLACK) == 0


def test_a_signal_while_a_commit_drains_lets_it_end_with_the_work(tmp_path: Path) -> None:
    arguments = ("--seconds-per-token", "0.01", "--drain-timeout", "20")
    with process(tmp_path, *arguments) as worker, RawClient(worker.wait_ready().address) as client:
        client.hello()
        submit(client, group(max_tokens=100))
        eventually(lambda: client.call("status")["trajectories_running"] == 1)
        client.call("prepare_weights", update_id="u", path="w", version=1)
        commit = client.send("commit_weights", update_id="u", version=1, drain_timeout_s=30.0)
        client.call("ping")
        worker.signal(signal.SIGTERM)
        eventually(lambda: client.call("status")["state"] == "draining")
        error = client.call("prepare_weights", update_id="v", path="w", version=2)["error"]
        assert error["code"] == "shutting_down"
        assert client.record()["status"] == "truncated"
        assert client.reply(commit)["type"] in ("weights_committed", "error")
        assert worker.wait() == 0


def test_a_paused_worker_does_not_wait_for_work_that_cannot_end(tmp_path: Path) -> None:
    arguments = ("--seconds-per-token", "0.01", "--drain-timeout", "60")
    with process(tmp_path, *arguments) as worker, RawClient(worker.wait_ready().address) as client:
        client.hello()
        submit(client, group(max_tokens=100))
        client.call("pause")
        worker.signal(signal.SIGTERM)
        assert client.record()["finish_reason"] == "abort_shutdown"
        assert worker.wait(GRACE + SLACK) == 0


@pytest.mark.parametrize("place", ["", ",process"])
def test_environments_that_hang_hold_neither_their_records_nor_the_process(tmp_path: Path, place: str) -> None:
    kinds = {"stuck": "Stuck", "blocked": "Blocked", "lingering": "Lingering"}
    arguments = ["--drain-timeout", "0.5"]
    for name, kind in kinds.items():
        arguments += ["--env", f"{name}=tests.rollout.hanging:{kind}{place}"]
    with process(tmp_path, *arguments) as worker, RawClient(worker.wait_ready().address) as client:
        client.hello()
        on_length = {"on_length": "continue"}
        submit(client, *(group(name, environment={"name": name}, budget=on_length, max_tokens=2) for name in kinds))
        eventually(lambda: client.call("status")["trajectories_running"] == 3)
        worker.signal(signal.SIGTERM)
        records = {(record := client.record())["group_id"]: record for _ in kinds}
        assert worker.wait(0.5 + GRACE + SLACK) == 0
    reasons = {name: record["finish_reason"] for name, record in records.items()}
    assert (reasons["stuck"], reasons["blocked"]) == ("abort_shutdown", "abort_shutdown")
    # A process may still have been starting.
    assert reasons["lingering"] == "env_done" or (place and reasons["lingering"] == "abort_shutdown")
    if not place:
        assert all(record["segments"][0]["loss_mask"].sum() == 2 for record in records.values())
    assert "Traceback" not in worker.log


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with process(tmp_path) as worker, RawClient(worker.wait_ready().address):
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        with pytest.raises(ProcessLookupError):
            os.kill(worker.process.pid, 0)


STUBBORN = """
import time
from rollout.command.cli import parse, run

def load(config):
    print("loading", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            print("not now")

run(parse(["--weights", "none", "--bind", "tcp://127.0.0.1:0"]), load)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_it_is_ready_ends_it_whatever_the_start_is_doing(number: signal.Signals) -> None:
    arguments = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "loading\n"
        worker.send_signal(number)
        said, log = worker.communicate(timeout=20)
    assert (worker.returncode, said) == (0, "")
    assert f"{number.name} before the worker was ready" in log


def test_ctrl_c_before_the_options_are_read_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("rollout.command.cli.main", interrupted)
    assert rollout.__main__.main() == 130
