"""The processes there are of one kind: started when they are needed, ended when they are not, buried when they die."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rollout.environments.nursery import Nursery
from rollout.environments.processes import Process

log = logging.getLogger(__name__)

IDLE_S: Final = 300.0
"""How long a process that nobody uses waits for its next user."""
RETRY_S: Final = 1.0
"""After a start that was refused, until the next."""
CLOSE_S: Final = 1.0
"""How long processes that were killed may take to be gone."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that every process of a stock can read, sent to none: it is unpickled where it is first asked for."""

    descriptor: int
    offset: int
    size: int

    def get(self) -> Any:
        return _unpickled(self)


@functools.lru_cache(maxsize=8)
def _unpickled(shared: Shared) -> Any:
    return pickle.loads(os.pread(shared.descriptor, shared.size, shared.offset))


class Stock:
    """At most `size` processes. Used on one event loop; starts nothing before it is asked to.

    changed: called when one is up or gone, and when a start may be tried again.
    alive: those that are not gone, also those that are not up yet. refused: why the last start failed, "" where it did
    not. deaths: of those that were up.
    """

    def __init__(self, size: int, name: str, changed: Callable[[], None]) -> None:
        self.size = size
        self.closed = False
        self.alive: list[Process] = []
        self.refused = ""
        self.deaths = 0
        self._name = name
        self._changed = changed
        self._refusals = 0
        self._retry: asyncio.TimerHandle | None = None
        self._trim: asyncio.TimerHandle | None = None
        self._nursery: Nursery | None = None
        self._shared: dict[int, tuple[Any, Shared]] = {}
        self._memory: int | None = None

    @property
    def busy(self) -> int:
        """How many have users."""
        return sum(process.load > 0 for process in self.alive)

    @property
    def starting(self) -> int:
        """How many are on their way for whoever comes."""
        return sum(process.load == 0 and not process.up.done() for process in self.alive)

    def idle(self) -> Process | None:
        """Of those that are up and have no user, the one that had one last: the others may then be ended."""
        return max(self._idle(), key=lambda process: process.idle_since, default=None)

    def start(self) -> Process | None:
        """One more. None: there may be no more, or none can be started, and `changed` is called when that is over."""
        if self.closed or self._retry is not None or len(self.alive) >= self.size:
            return None
        try:
            if self._nursery is None or not self._nursery.alive:
                self._nursery = Nursery((self._descriptor(),))
            process = Process(f"process of {self._name}", self._nursery)
        except OSError as error:
            self._refuse(str(error))
            return None
        self.alive.append(process)
        process.up.add_done_callback(lambda _: self._is_up(process))
        process.died.add_done_callback(lambda died: self._bury(process, died.result()))
        return process

    def put_back(self, process: Process) -> None:
        """One of its users is done with it."""
        process.load -= 1
        if process.load == 0:
            process.idle_since = time.monotonic()
            self._watch_idle()

    def share(self, value: Any) -> Shared:
        """The same value is kept once. It lives as long as this."""
        if (known := self._shared.get(id(value))) is not None:
            return known[1]
        data = pickle.dumps(value, protocol=5)
        memory = self._descriptor()
        shared = Shared(memory, os.fstat(memory).st_size, len(data))
        os.pwrite(memory, data, shared.offset)
        self._shared[id(value)] = (value, shared)
        return shared

    async def close(self) -> None:
        """Kill them all. Idempotent."""
        self.closed = True
        for timer in (self._retry, self._trim):
            if timer is not None:
                timer.cancel()
        processes = list(self.alive)
        for process in processes:
            process.kill("no longer needed")
        if processes:
            await asyncio.wait([asyncio.ensure_future(process.gone()) for process in processes], timeout=CLOSE_S)
        if self._nursery is not None:
            self._nursery.close()
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def _is_up(self, process: Process) -> None:
        if self._refusals:
            log.warning("a %s was started again, after %d refusals", process.name, self._refusals)
        self.refused, self._refusals = "", 0
        process.idle_since = time.monotonic()
        self._watch_idle()
        self._changed()

    def _bury(self, process: Process, how: str) -> None:
        if process not in self.alive:
            return
        self.alive.remove(process)
        if not self.closed:
            if process.up.done():
                self.deaths += 1
                log.warning("%s: %s", process, how)
            else:
                self._refuse(how)
        self._changed()

    def _refuse(self, why: str) -> None:
        """Said once, and then how often when it is over."""
        self.refused = why
        self._refusals += 1
        if self._refusals == 1:
            log.error("no process of %s can be started, and it is tried again every %g s: %s", self._name, RETRY_S, why)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._changed()

    def _watch_idle(self) -> None:
        if self._trim is None and not self.closed:
            self._trim = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)

    def _end_idle(self) -> None:
        self._trim = None
        now = time.monotonic()
        for process in self._idle():
            if now - process.idle_since < IDLE_S:
                self._watch_idle()
                continue
            self.alive.remove(process)
            process.kill("not used any more")

    def _idle(self) -> list[Process]:
        return [process for process in self.alive if process.load == 0 and process.is_up]

    def _descriptor(self) -> int:
        if self._memory is None:
            self._memory = os.memfd_create("shared values")
        return self._memory
