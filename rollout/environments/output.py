"""What a process for foreign code prints: read at a bounded rate, logged at debug level, the end of it kept."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from contextlib import suppress
from typing import Final

log = logging.getLogger(__name__)

CHUNK: Final = 2**18
PAUSE_S: Final = 0.05
"""Between two chunks: who prints more than 5 MB/s is held up, and costs the loop next to nothing."""
TAIL: Final = 800
"""Bytes that are told."""
KEPT: Final = 16 * TAIL
CRASH: Final = b"Fatal Python error: "
THREAD: Final = b"Current thread "
"""What the interpreter writes last of all, where it can: the stacks of its threads, also that where the fault was. Each
begins with its innermost frame."""


class Output:
    def __init__(self, end: int, name: str) -> None:
        """end: the reading end of a pipe, closed here."""
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._name = name
        self._kept = b""
        self._closed = False
        self._pause: asyncio.TimerHandle | None = None
        os.set_blocking(end, False)
        with suppress(OSError):  # who has many pipes gets no large ones
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, CHUNK)
        self._loop.add_reader(end, self._read)

    def tail(self) -> str:
        """The last of what was printed until now, or nearly; of a crash where it was."""
        self._take()
        printed, crash, trace = self._kept.rpartition(CRASH)
        if not crash:
            printed, trace = trace, b""
        what, _, _ = trace.partition(b"\n")
        _, current, stack = trace.rpartition(THREAD)
        crash = b"\n".join((crash + what, current + stack))[: TAIL * 3 // 4]
        return (printed[len(crash) - TAIL :] + crash).decode(errors="replace").strip()

    def forget(self) -> None:
        """What was printed until now is nothing to whoever comes next."""
        self._take()
        self._kept = b""

    def close(self) -> None:
        """Whoever wrote is gone. Idempotent."""
        if self._closed:
            return
        self._take()
        self._closed = True
        self._loop.remove_reader(self._end)
        if self._pause is not None:
            self._pause.cancel()
        os.close(self._end)

    def _read(self) -> None:
        self._loop.remove_reader(self._end)
        if self._take():
            self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._end, self._read)

    def _take(self) -> bool:
        """One chunk. False: nobody can write any more."""
        if self._closed:
            return False
        try:
            chunk = os.read(self._end, CHUNK)
        except BlockingIOError:
            return True
        if chunk:
            self._kept = (self._kept + chunk)[-KEPT:]
            log.debug("%s: %s", self._name, chunk[-TAIL:].decode(errors="replace"))
        return bool(chunk)
