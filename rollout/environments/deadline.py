"""A time limit that can be stopped, and goes on with what was left of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Deadline:
    """Runs from the start. seconds: in all; None is for ever. passed: called once, when they are over."""

    def __init__(self, seconds: float | None, passed: Callable[[], None]) -> None:
        self._left = seconds
        self._passed = passed
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.start()

    def start(self) -> None:
        """Go on after `stop`."""
        if self._left is None or self._timer is not None:
            return
        if self._left <= 0:
            self._over()
            return
        self._since = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._left, self._over)

    def stop(self) -> None:
        if self._timer is not None and self._left is not None:
            self._timer.cancel()
            self._timer = None
            self._left -= time.monotonic() - self._since

    def end(self) -> None:
        """It does not matter any more. Lets go of what it would have called: that often holds the deadline."""
        self.stop()
        self._left, self._passed = None, _nothing

    def _over(self) -> None:
        passed = self._passed
        self.end()
        passed()


def _nothing() -> None:
    pass
