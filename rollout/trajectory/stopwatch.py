"""Where a trajectory's wall time went."""

from __future__ import annotations

import time

from engine.request import Times as EngineTimes
from protocols.fields import Times

ENGINE_PARTS = ("queue", "prefill", "decode", "preempted", "paused")


class Stopwatch:
    """Each moment between `start` and the last entry is counted once, so that the parts add up to `wall_s`.

    The engine splits its own part of a turn; what it does not account for (the way to it and back, the loop being
    busy) is `queue`. Everything between turns is `tool_wait`: the environment and the worker's own bookkeeping.
    """

    def __init__(self, start: float | None) -> None:
        """start: `time.monotonic()` of the first moment; None is now."""
        self._start = self._mark = time.monotonic() if start is None else start
        self._seconds = dict.fromkeys(Times.model_fields, 0.0)

    @property
    def total(self) -> Times:
        return Times(**self._seconds)

    @property
    def wall_s(self) -> float:
        return self._mark - self._start

    def queued(self) -> None:
        """Until now it waited to start."""
        self._seconds["queue"] += self._lap()

    def paused(self) -> None:
        """Until now it was parked."""
        self._seconds["paused"] += self._lap()

    def turn(self, engine: EngineTimes) -> Times:
        """Until now the engine had it."""
        lap = self._lap()
        parts = {name: getattr(engine, name) for name in ENGINE_PARTS}
        claimed = sum(parts.values())
        if claimed > lap:
            parts = {name: seconds * lap / claimed for name, seconds in parts.items()}
        parts["queue"] += max(lap - claimed, 0.0)
        for name, seconds in parts.items():
            self._seconds[name] += seconds
        return Times.model_construct(**parts)

    def tool(self) -> float:
        """Until now the environment had it. Returns the seconds."""
        lap = self._lap()
        self._seconds["tool_wait"] += lap
        return lap

    def _lap(self) -> float:
        before, self._mark = self._mark, time.monotonic()
        return self._mark - before
