"""Field report 69: no key, no terminal, no network, no package, no place to write; and neighbours of these.

A real worker each time. Its rollouts are those of a worker without W&B, it is ready before W&B begins, says one thing
about it, and ends as it should.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rollout.client import RolloutClient
from tests import rigs
from tests.rollout.workers import ROOT, eventually

KEY = "a" * 40
NOWHERE = "http://127.0.0.1:9"
"""Refuses connections, as a network that is blocked does."""
WANDB = ("--wandb-project", "p", "--wandb-mode")


class Worker:
    """`python -m rollout` over a tiny model, with a closed standard input."""

    def __init__(self, checkpoint: Path, folder: Path, options: Sequence[str], variables: dict[str, str]) -> None:
        self.metrics = folder / "metrics.jsonl"
        self._ready, self._log = folder / "ready.json", folder / "log"
        arguments = ["--weights", str(checkpoint), "--bind", "tcp://127.0.0.1:0", "--ready-file", str(self._ready)]
        arguments += ["--kv-tokens", "4096", "--max-running", "8", "--max-step-tokens", "64"]
        arguments += ["--metrics-file", str(self.metrics), "--metrics-interval", "0.5", *options]
        variables = {
            "HOME": str(folder),
            "WANDB_DIR": str(folder),
            "TMPDIR": str(folder),
            "PYTHONPATH": str(ROOT),
        } | variables
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", 'exec "$0" "$@" <&-', sys.executable, "-m", "rollout", *arguments],
                cwd=folder,
                env=kept | variables,
                stdout=log,
                stderr=log,
            )
        eventually(lambda: self._ready.exists() or self.process.poll() is not None, 120)
        assert self._ready.exists(), self.log
        self.address = str(json.loads(self._ready.read_text())["address"])

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def warnings(self) -> list[str]:
        return re.findall(r"^.*(?:WARNING|ERROR|CRITICAL).*$", self.log, re.MULTILINE)

    def rollouts(self) -> list[list[int]]:
        with RolloutClient(self.address) as client:
            groups = [client.group([5, 6, 7 + i], n=2, max_tokens=12, seed=11 + i) for i in range(3)]
            return [t.token_ids.tolist() for t in client.submit(groups, step=4).results(timeout=120)]

    def stop(self) -> list[psutil.Process]:
        """Its children, after a SIGTERM and a good end."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log
        return children


@contextmanager
def running(checkpoint: Path, folder: Path, *options: str, **variables: str) -> Iterator[Worker]:
    worker = Worker(checkpoint, folder, options, variables)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rigs.write_rand(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="module")
def disabled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Rollouts without W&B."""
    with running(checkpoint, tmp_path_factory.mktemp("off"), *WANDB, "disabled") as worker:
        found = worker.rollouts()
        assert worker.stop() == []
        assert not worker.warnings
    return found


def steps(path: Path) -> list[int]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["rollout/step"] for row in rows if row["kind"] == "round"]


@contextmanager
def silent_host() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def check(
    checkpoint: Path,
    folder: Path,
    disabled: list[list[int]],
    mode: str,
    warning: str,
    *options: str,
    at_the_end: bool = False,
    **variables: str,
) -> None:
    """warning: the one there is. at_the_end: only when the worker stops, not before."""
    with running(checkpoint, folder, *WANDB, mode, *options, **variables) as worker:
        assert worker.rollouts() == disabled
        if not at_the_end:
            eventually(lambda: warning in worker.log, 90)
        children = worker.stop()
        eventually(lambda: not any(child.is_running() for child in children), 20)
        (told,) = worker.warnings
        assert warning in told
        assert worker.log.index("ready address") < worker.log.index(told), "W&B is not waited for"
        assert "wandb login" not in worker.log.replace(told, ""), "it asks nobody for anything"
        if "--metrics-file" not in options:
            assert steps(worker.metrics) == [4]


def test_no_key_and_no_terminal(checkpoint: Path, tmp_path: Path, disabled: list[list[int]]) -> None:
    check(checkpoint, tmp_path, disabled, "online", "No API key configured")


def test_a_directory_that_cannot_be_written(checkpoint: Path, tmp_path: Path, disabled: list[list[int]]) -> None:
    check(checkpoint, tmp_path, disabled, "offline", "/proc/none cannot be written", WANDB_DIR="/proc/none")


@pytest.mark.stress
def test_a_bogus_key_and_a_network_that_refuses(checkpoint: Path, tmp_path: Path, disabled: list[list[int]]) -> None:
    # W&B tries again for half a minute; a worker that ends meanwhile does not wait for it.
    check(
        checkpoint,
        tmp_path,
        disabled,
        "online",
        "W&B did not finish in time",
        at_the_end=True,
        WANDB_API_KEY=KEY,
        WANDB_BASE_URL=NOWHERE,
    )


@pytest.mark.stress
def test_a_bogus_key_and_a_network_that_swallows(checkpoint: Path, tmp_path: Path, disabled: list[list[int]]) -> None:
    with silent_host() as url:
        check(
            checkpoint,
            tmp_path,
            disabled,
            "online",
            "W&B did not finish in time",
            at_the_end=True,
            WANDB_API_KEY=KEY,
            WANDB_BASE_URL=url,
        )


def test_a_key_that_is_none(checkpoint: Path, tmp_path: Path, disabled: list[list[int]]) -> None:
    check(checkpoint, tmp_path, disabled, "online", "WANDB_API_KEY invalid", WANDB_API_KEY="none")


def test_the_package_is_not_installed(checkpoint: Path, tmp_path: Path, disabled: list[list[int]]) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError(\"No module named 'wandb'\")\n")
    check(
        checkpoint,
        tmp_path,
        disabled,
        "online",
        "install the extra, rollout-worker[wandb]",
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )


def test_a_metrics_file_that_cannot_be_written(checkpoint: Path, tmp_path: Path, disabled: list[list[int]]) -> None:
    unwritable = "/proc/none/metrics.jsonl"
    with running(checkpoint, tmp_path, "--metrics-file", unwritable) as worker:
        assert worker.rollouts() == disabled
        worker.stop()
        (told,) = worker.warnings
        assert "the metrics file cannot be opened, the worker goes on without it: /proc/none/metrics.jsonl: " in told
        assert told.endswith(": choose another --metrics-file")
