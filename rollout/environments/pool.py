"""Processes for foreign code: made when they are needed, replaced when they die.

pool = Pool(8, "tools")
text = await pool.call(run_tool, (name, arguments), deadline=5.0)   # alone in its process, for a function
process = await pool.lease()                                        # beside others, for an object kept there
pool.release(process)
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollout.environments.errors import ProcessDied, Reported
from rollout.environments.nursery import Nursery
from rollout.environments.processes import Process

__all__ = ["Pool", "ProcessDied", "Reported", "Shared"]

log = logging.getLogger(__name__)

CLOSE_S: Final = 1.0
"""How long processes that were killed may take to be gone."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that every process of a pool can read, sent to none: it is unpickled where it is first asked for."""

    descriptor: int
    offset: int
    size: int

    def get(self) -> Any:
        return _unpickled(self)


@functools.lru_cache(maxsize=8)
def _unpickled(shared: Shared) -> Any:
    return pickle.loads(os.pread(shared.descriptor, shared.size, shared.offset))


class Pool:
    """At most `size` processes. Used on one event loop; nothing is started before it is needed."""

    def __init__(self, size: int, name: str = "environments") -> None:
        self._size = size
        self._name = name
        self._processes: list[Process] = []
        self._alone: set[Process] = set()
        self._changed = asyncio.Event()
        self._shared: dict[int, tuple[Any, Shared]] = {}
        self._memory: int | None = None
        self._nursery: Nursery | None = None
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    async def call(self, function: Callable[..., Any], args: Sequence[Any] = (), deadline: float | None = None) -> Any:
        """`function(*args)` in a process where nothing else runs meanwhile; what it leaves running there is killed.

        function: one that can be imported by its name; a coroutine function too. args, and what it returns: plain
        values (numbers, text, bytes, collections, arrays, classes of ours), the latter of at most MAX_RESULT bytes.
        deadline: seconds from its start; the wait for a free process does not count.
        Raises TimeoutError, Reported (what it raised, or why it returned nothing usable) and ProcessDied.
        """
        process = await self._take(alone=True)
        try:
            return await asyncio.wait_for(process.run(function, args, grace=0.0), deadline)
        finally:
            if process.leaves_children:
                process.kill("killed, since a call left processes behind")
            self.release(process)

    async def lease(self) -> Process:
        """The process with the fewest users, a new one where all have some and there may be more.

        To be given back to `release`. Raises ProcessDied, OSError.
        """
        return await self._take(alone=False)

    def release(self, process: Process) -> None:
        process.load -= 1
        self._alone.discard(process)
        self._wake()

    def share(self, value: Any) -> Shared:
        """The same value is kept once. It lives as long as the pool."""
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
        self._closed = True
        processes = list(self._processes)
        for process in processes:
            process.kill("no longer needed")
        if processes:
            await asyncio.wait([asyncio.ensure_future(process.gone()) for process in processes], timeout=CLOSE_S)
        if self._nursery is not None:
            self._nursery.close()
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    async def _take(self, *, alone: bool) -> Process:
        while (process := self._find(alone)) is None:
            await self._changed.wait()
        process.load += 1
        if alone:
            self._alone.add(process)
        try:
            await process.ready()
        except BaseException:
            self.release(process)
            raise
        return process

    def _find(self, alone: bool) -> Process | None:
        if self._closed:
            raise ProcessDied(f"{self._name}: there are no more processes")
        usable = [p for p in self._processes if p not in self._alone and not p.died.done()]
        least = min(usable, key=lambda process: process.load, default=None)
        if least is not None and least.load == 0:
            return least
        if len(self._processes) < self._size:
            return self._start()
        return None if alone else least

    def _start(self) -> Process:
        if self._nursery is None or not self._nursery.alive:
            self._nursery = Nursery((self._descriptor(),))
        process = Process(f"process of {self._name}", self._nursery)
        self._processes.append(process)
        process.died.add_done_callback(lambda died: self._bury(process, died.result()))
        return process

    def _bury(self, process: Process, reason: str) -> None:
        self._processes.remove(process)
        if not self._closed:
            log.warning("%s", reason)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _descriptor(self) -> int:
        if self._memory is None:
            self._memory = os.memfd_create("shared values")
        return self._memory
