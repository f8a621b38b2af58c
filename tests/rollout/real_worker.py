"""The worker over the real engine, both on threads of this process: a checkpoint in, records out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.command.cli import parse
from rollout.command.load import load
from rollout.metrics.observer import Observer
from rollout.service.service import Timeouts
from tests.rollout.workers import TIMEOUTS, WorkerThread


@contextmanager
def real_worker(
    checkpoint: Path, *, timeouts: Timeouts = TIMEOUTS, observer: Observer | None = None, **options: Any
) -> Iterator[WorkerThread]:
    """options: the command's, with underscores; small ones where none are given."""
    given = {"max_running": 8, "max_step_tokens": 64, "kv_tokens": 4096, "device": "cpu", **options}
    arguments = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    loaded = load(parse(["--weights", str(checkpoint), *arguments]))
    thread = WorkerThread(loaded.handle, what=loaded.served, timeouts=timeouts, observer=observer).start()  # type: ignore[arg-type]
    try:
        yield thread
    finally:
        thread.stop()
