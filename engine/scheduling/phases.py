"""Where the wall time of a request went: by what it waited for, pauses of the whole engine apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from engine.request import Times

Phase = Literal["queue", "prefill", "decode", "preempted"]


class PausableClock:
    """Seconds, and how many of them the engine was paused: counted once, so that a pause costs nothing per request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paused = 0.0
        self._since: float | None = None

    def pause(self) -> float:
        """Begin to pause, unless it does already. Returns now."""
        now = self._clock()
        if self._since is None:
            self._since = now
        return now

    def resume(self) -> None:
        _, self._paused = self.read()
        self._since = None

    def read(self) -> tuple[float, float]:
        """Now, and the seconds paused until now."""
        now = self._clock()
        return now, self._paused + (now - self._since if self._since is not None else 0.0)


class PhaseTimes:
    """Seconds by phase, "queue" from now on. Time in which the engine was paused belongs to no phase but `paused`."""

    def __init__(self, clock: PausableClock) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = dict.fromkeys(("queue", "prefill", "decode", "preempted", "paused"), 0.0)
        self._phase: Phase = "queue"
        self._now, self._paused = clock.read()

    def enter(self, phase: Phase) -> None:
        now, paused = self._clock.read()
        pause = paused - self._paused
        self._seconds[self._phase] += now - self._now - pause
        self._seconds["paused"] += pause
        self._phase, self._now, self._paused = phase, now, paused

    def end(self) -> Times:
        self.enter(self._phase)
        return Times(**self._seconds)
