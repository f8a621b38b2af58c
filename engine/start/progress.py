"""How far a long start has come, for whoever waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(what, done, of): called from the thread that does the work, at every step of it, `done` rising from 0 or 1 to `of`.
Cheap: who shows it decides how often."""

READING: Final = "reading weights"
"""Counted in bytes; whatever else is counted in pieces."""
CAPTURING: Final = "capturing graphs"
CAPTURING_PIECES: Final = "capturing steps with prompts"
WARMING: Final = "warming kernels"

INTERVAL_S = 1.0
"""Between two lines about the same thing: a start of seconds is no page of log."""


def silent(what: str, done: int, of: int) -> None:
    """Nobody waits."""


class LoggedProgress:
    """A `Progress` of plain log lines: one a second, and one when it is done. Can be sent to another process."""

    def __init__(self) -> None:
        self._what = ""
        self._last = 0.0

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._last = what, now
        if done < of and now - self._last < INTERVAL_S:
            return
        self._last = now
        log.info("%s: %s", what, amount(done, of) if what == READING else f"{done} of {of}")


def amount(done: int, of: int) -> str:
    """`1.2 of 8.0 GB`, in powers of 1000."""
    scale, unit = (1e9, "GB") if of >= 1e9 else (1e6, "MB")
    return f"{done / scale:.1f} of {of / scale:.1f} {unit}"
