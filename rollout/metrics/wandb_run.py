"""The numbers in Weights & Biases, whose library runs in a process of its own.

There it may be absent, refuse, hang, print, ask for a password or die, and the worker's threads, signals, exit and
interpreter lock have no part in it. A worker that is killed loses no row: the child sees the end of its input and
finishes the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollout.metrics.feed import Gone
from rollout.metrics.row import ROUND_AXIS, TIME_AXIS, Row

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WandbOptions:
    """As in `wandb.init`. mode auto: WANDB_MODE, else online. resume_id: of a run to go on with, or to begin.

    config: what the run's page shows of the worker, plain values.
    """

    project: str
    mode: str = "auto"
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    resume_id: str | None = None
    config: Mapping[str, Any] | None = None


class WandbRun:
    """Starts the child. child: what Python is to run. Methods raise Gone once it is no more."""

    def __init__(self, options: WandbOptions, *, child: Sequence[str] = ("-m", "rollout.metrics.wandb_child")) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Its own words would stand between our log lines.
            stderr=subprocess.DEVNULL,
            text=True,
            # Signals to the worker's group are not for it, and without a terminal it cannot ask for a key.
            start_new_session=True,
        )
        self._told = threading.Thread(target=self._listen, name="metrics W&B replies", daemon=True)
        self._told.start()
        self._abandoned = False
        axes = {"rollout/*": ROUND_AXIS} | dict.fromkeys(
            ("engine/*", "env/*", "weights/*", "mem/*", "wire/*"), TIME_AXIS
        )
        self._send({"options": asdict(options), "axes": axes, "worker": os.getpid()})

    def write(self, row: Row) -> None:
        """Blocks while the child does not read."""
        self._send(dict(row.values))

    def close(self) -> None:
        """The child finishes the run, for as long as it takes."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._told.join()
        self._process.wait()

    def abandon(self) -> None:
        self._abandoned = True
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            self._told.join()
            raise Gone from None

    def _listen(self) -> None:
        """What the child has to say: `warning` once, if anything fails, or `info`. It ends with the child."""
        began, warned = time.monotonic(), False
        assert self._process.stdout is not None
        for line in self._process.stdout:
            for level, text in json.loads(line).items():
                warned |= level == "warning"
                log.log(logging.WARNING if level == "warning" else logging.INFO, "W&B: %s", text)
        if (code := self._process.wait()) and not warned and not self._abandoned:
            log.warning("W&B's process ended with code %d after %.1f s", code, time.monotonic() - began)
