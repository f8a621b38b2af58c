"""A place that shows numbers, on a thread of its own: what blocks or fails there is felt nowhere else."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Gone(Exception):
    """The place is no more, and the log says why."""


class Sink(Protocol[T_contra]):
    """Used by one thread, but for `abandon`. Every method may block, and raise."""

    def write(self, item: T_contra) -> None: ...

    def close(self) -> None:
        """Bring what was written to safety. Comes last, and not at all where the sink could not be made."""

    def abandon(self) -> None:
        """From another thread, when the time for `close` is up: let go, so that nothing is left behind."""


class Feed(Generic[T]):
    """Hands items to a sink, on a thread of its own. What does not fit is dropped, and counted.

    name: what the log calls it. make: makes the sink, on that thread, when the first item comes: a place that takes
    its time delays no start. capacity: items that may wait. newest: each item takes the place of the one that waits.
    """

    def __init__(self, name: str, make: Callable[[], Sink[T]], *, capacity: int = 1000, newest: bool = False) -> None:
        self.name = name
        self.dropped = 0
        self._make = make
        self._capacity = capacity
        self._items: deque[T] = deque(maxlen=1 if newest else None)
        self._changed = threading.Condition()
        self._closing = False
        self._warned = False
        self._sink: Sink[T] | None = None
        self._thread = threading.Thread(target=self._run, name=f"metrics {name}", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Never blocks, never raises."""
        with self._changed:
            if self._closing or len(self._items) >= self._capacity:
                self.dropped += 1
                return
            self._items.append(item)
            self._changed.notify()

    def begin_close(self) -> None:
        """Nothing more is put; what waits is still written."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def end_close(self, timeout: float) -> None:
        """Wait for the end of what `begin_close` began; after `timeout` seconds it is given up."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._warn("did not finish in time: its last numbers may be missing")
            if self._sink is not None:
                self._sink.abandon()
                self._thread.join(1.0)
        if self.dropped:
            why = "" if self._warned else ": they came faster than it took them"
            self._warn(f"lacks {self.dropped} of its rows{why}")

    def _run(self) -> None:
        item = self._next()
        try:
            self._sink = self._make() if item is not None else None
        except Exception as error:
            self._warn(f"cannot be opened, the worker goes on without it: {_reason(error)}")
        while item is not None:
            self._write(item[0])
            item = self._next()
        try:
            if self._sink is not None:
                self._sink.close()
        except Exception as error:
            self._warn(f"could not be closed, its last numbers may be missing: {_reason(error)}")

    def _next(self) -> tuple[T] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closing)
            return (self._items.popleft(),) if self._items else None

    def _write(self, item: T) -> None:
        try:
            if self._sink is not None:
                self._sink.write(item)
                return
        except Gone:
            self._warned = True
        except Exception as error:
            if not self._warned:
                self._warn(f"cannot be written, the worker goes on without what it missed: {_reason(error)}")
        with self._changed:
            self.dropped += 1

    def _warn(self, what: str) -> None:
        """Once: the numbers are not worth more of the log."""
        log.log(logging.INFO if self._warned else logging.WARNING, "%s %s", self.name, what)
        self._warned = True


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def close_all(feeds: Iterable[Feed[T]], timeout: float) -> None:
    """`timeout` seconds for all of them together."""
    feeds = tuple(feeds)
    deadline = time.monotonic() + timeout
    for feed in feeds:
        feed.begin_close()
    for feed in feeds:
        feed.end_close(max(0.0, deadline - time.monotonic()))
