"""The command's options of metrics, on a worker of its own process over a timed engine."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import urllib.error
import urllib.request
from pathlib import Path

from rollout.client import RolloutClient
from tests.rollout.workers import ROOT, WorkerProcess, eventually

STUB = "tests.rollout.stub_worker"


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def endpoint(worker: WorkerProcess) -> str:
    pattern = re.compile(r"metrics at (http://\S+)/metrics")
    eventually(lambda: pattern.search(worker.log) is not None, 60)
    found = pattern.search(worker.log)
    assert found is not None
    return found[1]


def test_the_port_answers_from_the_start_and_says_when_the_worker_is_ready(tmp_path: Path) -> None:
    options = ("--metrics-port", "0", "--metrics-interval", "0.1", "--metrics-file", str(tmp_path / "m.jsonl"))
    worker = WorkerProcess(STUB, "--load-s", "3", *options, folder=tmp_path)
    try:
        url = endpoint(worker)
        assert get(f"{url}/healthz") == (200, "starting\n")
        assert get(f"{url}/readyz") == (503, "starting\n")
        worker.wait_ready()
        eventually(lambda: get(f"{url}/readyz") == (200, "version 0 serves\n"))
        with RolloutClient(worker.address) as client:
            client.submit(client.group([1, 2], 4, max_tokens=3), step=9).results()
        eventually(lambda: "rollout_worker_rollout_step 9.0" in get(f"{url}/metrics")[1])
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        assert [row["rollout/step"] for row in rows if row["kind"] == "round"] == [9]
    finally:
        worker.kill()


def test_without_a_name_the_file_is_in_a_folder_of_the_working_directory(tmp_path: Path) -> None:
    worker = WorkerProcess(STUB, folder=tmp_path, elsewhere=True)
    try:
        worker.wait_ready()
        eventually(lambda: any((tmp_path / "rollout-metrics").glob(f"*-{worker.process.pid}.jsonl")))
    finally:
        worker.kill()


def test_a_port_that_is_taken_ends_the_start_and_says_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        worker = WorkerProcess(STUB, "--metrics-port", str(port), folder=tmp_path)
        try:
            assert worker.wait(60) == 1
            assert f"--metrics-port: 127.0.0.1:{port} cannot be served, Address already in use" in worker.log
            assert "loading" not in worker.log
        finally:
            worker.kill()


def test_a_terminal_gets_a_line_of_what_goes_on(tmp_path: Path) -> None:
    screen, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    arguments = ["--bind", f"ipc://{tmp_path}/w", "--metrics-file", os.devnull, "--metrics-interval", "0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", STUB, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=end
    )
    os.close(end)
    shown = ""
    try:
        while "version 0  0 running, 0 waiting  0 tokens/s" not in shown:
            shown += os.read(screen, 4096).decode()
    finally:
        process.kill()
        process.wait()
        os.close(screen)
