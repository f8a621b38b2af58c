"""The process that holds the W&B run: settings and rows come as JSON lines, and their end is its end.

    python -m rollout.metrics.wandb_child

Its only words are JSON lines on standard output: {"info": ...} or {"warning": ...}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any, TextIO

Row = dict[str, float]
ALONE = "the numbers are in the metrics file alone"

INIT_S = 30.0
"""How long an online run may take to begin before it becomes an offline one."""
LEAVE_S = 30.0
"""How long the run may take to finish when the worker is gone and nobody else limits it."""
ORPHANED_S = 5.0
"""How long after the worker's death the end of the input may take to be seen."""
NICE = 10
WAITING = 10_000
"""Rows that wait for the run to begin; then the pipe fills, and the worker drops."""


def main() -> None:
    # A service manager may signal every process of the worker's: what counts is the end of the input.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Importing it and sending rows away is work, and none that a rollout should wait for.
    os.nice(NICE)
    # What the library prints goes where its errors go.
    words = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    rows: Queue[Row | None] = Queue(WAITING)
    for target in (_read, _follow):
        threading.Thread(target=target, args=(rows, first["worker"]), daemon=True).start()
    try:
        run = _begin(first["options"], first["worker"], words)
    except ImportError as error:
        _say(words, warning=f"{error}: install the extra, rollout-worker[wandb]; {ALONE}")
        return
    except Exception as error:
        _say(words, warning=f"{_short(error)}; {ALONE}")
        return
    for names, axis in first["axes"].items():
        run.define_metric(axis, hidden=True)
        run.define_metric(names, step_metric=axis)
    while (row := rows.get()) is not None:
        # Never with a step of W&B's own: that one only grows, and late rounds have an axis of theirs.
        run.log(row)
    run.finish()


def _begin(options: dict[str, Any], worker: int, words: TextIO) -> Any:
    import wandb

    def begin(mode: Any) -> Any:
        return wandb.init(
            project=options["project"],
            entity=options["entity"],
            name=options["name"],
            group=options["group"],
            id=options["resume_id"],
            resume="allow" if options["resume_id"] else None,
            config=options["config"],
            job_type="rollout",
            mode=mode,
            settings=wandb.Settings(
                console="off", silent=True, disable_code=True, disable_git=True, init_timeout=INIT_S, x_stats_pid=worker
            ),
        )

    mode = None if options["mode"] == "auto" else options["mode"]
    try:
        run = begin(mode)
    except Exception as error:
        if mode == "offline":
            raise
        run = begin("offline")
        _say(words, warning=f"{_short(error)}; the run is kept offline, see: wandb sync {_folder(run)}")
    else:
        wanted = Path(os.environ.get("WANDB_DIR") or ".").resolve()
        if not _folder(run).resolve().is_relative_to(wanted):
            _say(words, warning=f"{wanted} cannot be written, the run is in {_folder(run)}")
        else:
            _say(words, info=run.url or f"an offline run in {_folder(run)}")
    return run


def _folder(run: Any) -> Path:
    return Path(run.dir).parent


def _short(error: Exception) -> str:
    """The first sentence: what follows, in this library, is advice to people at a terminal."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"


def _say(words: TextIO, **what: str) -> None:
    # A worker that was killed hears nothing; its rows are still written.
    with contextlib.suppress(OSError):
        print(json.dumps(what), file=words, flush=True)


def _read(rows: Queue[Row | None], _: int) -> None:
    for line in sys.stdin:
        rows.put(json.loads(line))
    _end(rows)


def _follow(rows: Queue[Row | None], worker: int) -> None:
    """Children of environments may hold the pipe open after the worker's death, too."""
    while os.getppid() == worker:
        time.sleep(1.0)
    time.sleep(ORPHANED_S)
    _end(rows)


def _end(rows: Queue[Row | None]) -> None:
    rows.put(None)
    time.sleep(LEAVE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
