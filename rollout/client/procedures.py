"""Procedures (see waiting.py) that run on the I/O thread itself, until the connection is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from protocols.errors import RolloutError
from rollout.client.waiting import Steps, settle


class Procedures:
    def __init__(self) -> None:
        self._running: set[Steps[None]] = set()
        self._sleepers: list[tuple[float, Future[None]]] = []

    def start(self, steps: Steps[None], done: Callable[[RolloutError | None], None]) -> None:
        """done: called with the error that ended it, or None."""
        self._running.add(steps)
        self._go_on(steps, done, lambda: next(steps))

    def sleep(self, seconds: float) -> Future[None]:
        future: Future[None] = Future()
        self._sleepers.append((time.monotonic() + seconds, future))
        return future

    def next_deadline(self) -> float:
        return min((at for at, _ in self._sleepers), default=float("inf"))

    def wake(self, now: float) -> None:
        due = [future for at, future in self._sleepers if at <= now]
        self._sleepers = [(at, future) for at, future in self._sleepers if at > now]
        for future in due:
            settle(future, None)

    def stop_all(self) -> None:
        self._running.clear()
        self._sleepers.clear()

    def _go_on(
        self, steps: Steps[None], done: Callable[[RolloutError | None], None], advance: Callable[[], Future[Any]]
    ) -> None:
        try:
            future = advance()
        except (StopIteration, RolloutError) as end:
            self._running.discard(steps)
            done(end if isinstance(end, RolloutError) else None)
            return

        def resume(future: Future[Any]) -> None:
            if steps not in self._running:
                return
            error = future.exception()
            self._go_on(steps, done, lambda: steps.throw(error) if error is not None else steps.send(future.result()))

        future.add_done_callback(resume)
