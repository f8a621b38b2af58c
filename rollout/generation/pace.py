"""Many small pieces of work on the event loop, so that whoever else needs it (a ping, say) waits a few ms at most."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

TURN_S = 0.01
"""How long one turn of the loop may take while there is work left."""
FIRST = 8
"""Steps of the first burst of all: they take a tenth of a turn, say."""


class Pace:
    """Calls `step` until it returns False, a burst in each turn of the loop, which may take `turn_s`. `wake`: there may
    be something to do.

    What a step leads to (tasks that it starts or wakes) costs more than the step and comes a few turns after it. So
    the length of a burst follows from how long the loop takes to come round again, whatever it does meanwhile: it
    doubles at most from turn to turn, and is cut to its share at once. What was learned stays: how long the loop takes
    before the first burst after a rest says nothing of it.
    """

    def __init__(self, step: Callable[[], bool], turn_s: float = TURN_S) -> None:
        self._step = step
        self._turn_s = turn_s
        self._burst = FIRST
        self._since: float | None = None
        self._scheduled: asyncio.Handle | None = None

    def wake(self) -> None:
        if self._scheduled is None:
            self._since = None
            self._scheduled = asyncio.get_running_loop().call_soon(self._go)

    def _go(self) -> None:
        before, self._since = self._since, time.perf_counter()
        if before is not None:
            took = max(self._since - before, 1e-6)
            self._burst = max(1, int(self._burst * min(2.0, self._turn_s / took)))
        for _ in range(self._burst):
            if not self._step():
                self._scheduled = None
                return
        self._scheduled = asyncio.get_running_loop().call_soon(self._go)


class Lanes(Generic[T]):
    """A queue with a lane for each of whoever puts into it; they take turns, so that a long lane delays no other."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[T]] = {}

    def put(self, lane: Hashable, item: T) -> None:
        self._lanes.setdefault(lane, deque()).append(item)

    def take(self) -> T | None:
        """The first item of the lane whose turn it is; None when all are empty."""
        if not self._lanes:
            return None
        name = next(iter(self._lanes))
        lane = self._lanes.pop(name)
        item = lane.popleft()
        if lane:
            self._lanes[name] = lane
        return item
