"""A worker of one's own for as long as a block of code runs: for examples, tests and notebooks.

with local_worker("checkpoints/tiny", max_running=16) as worker:
    client = RolloutClient(worker.address)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker that is ready. pid: of its process."""

    address: str
    pid: int


@contextmanager
def local_worker(
    weights: str | Path,
    *,
    start_timeout: float = 120.0,
    stop_timeout: float = 30.0,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[LocalWorker]:
    """Start `rollout-worker --weights ...` on a free port of this machine, wait until it is ready, stop it at the end.

    options: the command's, with underscores (`max_running=16`, `overlap=False`, `env=["name=module:Class"]`).
    environment: variables for the worker, beside our own. Its output goes where ours goes.
    Raises RuntimeError if it ends before it is ready, TimeoutError if it is not ready in `start_timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="rollout-worker-") as folder:
        ready = Path(folder) / "ready.json"
        given = {"bind": "tcp://127.0.0.1:0", **options, "weights": weights, "ready_file": ready}
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout", *_arguments(given)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        try:
            _wait_ready(process, ready, start_timeout)
            yield LocalWorker(address=str(json.loads(ready.read_text())["address"]), pid=process.pid)
        finally:
            _stop(process, stop_timeout)


def _arguments(options: Mapping[str, Any]) -> list[str]:
    arguments = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            arguments += [part for item in value for part in (f"--{flag}", str(item))]
        elif value is not None:
            arguments += [f"--{flag}", str(value)]
    return arguments


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not ready.exists():
        if (code := process.poll()) is not None:
            raise RuntimeError(f"the worker ended with exit code {code} before it was ready; its output says why")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the worker was not ready after {timeout:g} s")
        time.sleep(0.02)


def _stop(process: subprocess.Popen[bytes], timeout: float) -> None:
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
