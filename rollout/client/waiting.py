"""How the synchronous and the asyncio face share one body of code.

A procedure is a generator that yields the futures it waits for (`Steps[T]`). `run` waits for them by blocking,
`arun` by awaiting. Futures are settled by the I/O thread, whatever became of the waiter meanwhile.
"""

# ruff: noqa: ASYNC109  (both faces take `timeout`, so that a program can change from one to the other)
from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final, Generic, TypeVar

from protocols.errors import RolloutError, Timeout
from protocols.fields import Group

T = TypeVar("T")
Steps = Generator["Future[Any]", Any, T]


def run(steps: Steps[T], timeout: float | None = None) -> T:
    """Run a procedure to its end, blocking. Raises Timeout when it takes longer than `timeout` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        future = next(steps)
        while True:
            try:
                value = future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except BaseException as error:
                future.cancel()  # a no-op unless the wait itself was broken off
                if isinstance(error, TimeoutError) and future.cancelled():
                    error = Timeout(f"not finished after {timeout:g} s")
                future = steps.throw(error)
            else:
                future = steps.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def arun(steps: Steps[T], timeout: float | None = None) -> T:
    """Run a procedure to its end, awaiting. Raises Timeout when it takes longer than `timeout` seconds."""
    import asyncio  # a tenth of a second that only those pay who have a loop anyway

    limit = asyncio.timeout(timeout)
    try:
        future = next(steps)  # what waits already ends it here, and costs no timer
        async with limit:
            while True:
                try:
                    value = await asyncio.wrap_future(future)
                except BaseException as error:
                    future = steps.throw(error)
                else:
                    future = steps.send(value)
    except StopIteration as stop:
        result: T = stop.value
        return result
    except TimeoutError:
        if not limit.expired():  # then it is what the procedure raised: a reply's Timeout, a disk's OSError
            raise
        raise Timeout(f"not finished after {timeout:g} s") from None


def settle(future: Future[T], result: T) -> None:
    """Give a future its result, unless its waiter has given up."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def fail(future: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


class End:
    """What a mailbox hands out when nothing more will come."""


END: Final = End()


class Mailbox(Generic[T]):
    """Items of one batch on their way from the I/O thread to whoever iterates, on any thread or event loop.

    `left` counts the trajectories still to be put; with none left the mailbox ends. `error`, while set, is raised
    to whoever waits once the items are used up. `kept`: groups of those that will not come, for the worker keeps them.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self.kept: tuple[Group, ...] = ()
        self._items: deque[T] = deque()
        self._error: RolloutError | None = None
        self._waiters: list[Future[None]] = []
        self._lock = threading.Lock()

    def put(self, item: T, *, ends_trajectory: bool) -> None:
        """`wake` must follow: after several, so that threads hand the interpreter over once and not for each."""
        with self._lock:
            self._items.append(item)
            self.left -= ends_trajectory

    def withdraw(self, kept: tuple[Group, ...], count: int) -> None:
        """So many trajectories, in these groups, will not be put. `wake` must follow."""
        with self._lock:
            self.kept += kept
            self.left -= count

    def set_error(self, error: RolloutError) -> None:
        self._error = error
        self.wake()

    def clear_error(self, error: RolloutError) -> None:
        """Go on waiting, if it was this error."""
        if self._error is error:
            self._error = None

    def discard(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out, and return, the items that nobody should see any more."""
        with self._lock:
            out = [item for item in self._items if unwanted(item)]
            self._items = deque(item for item in self._items if not unwanted(item))
        return out

    def take(self) -> Steps[T | End]:
        """The next item, or END. Raises the mailbox's error."""
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                if self._error is not None:
                    raise self._error.with_traceback(None)
                if self.left == 0:
                    return END
                waiter: Future[None] = Future()
                self._waiters.append(waiter)
            yield waiter

    def wake(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            settle(waiter, None)
