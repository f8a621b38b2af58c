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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollout.environments.errors import NoProcess, ProcessDied, Reported
from rollout.environments.line import Line, Owner, Place
from rollout.environments.nursery import Nursery
from rollout.environments.processes import Process

__all__ = ["NoProcess", "Owner", "Pool", "PoolStats", "ProcessDied", "Reported", "Shared"]

log = logging.getLogger(__name__)

CLOSE_S: Final = 1.0
"""How long processes that were killed may take to be gone."""
SPARE_S: Final = 10.0
"""How long a process that is one more than there may be waits, idle, for the next call."""
NOBODY: Final = Owner()


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


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Now: processes, calls that wait for one. Since the start: calls that got one, seconds for which those waited,
    processes that died or had to be killed."""

    processes: int
    calls_waiting: int
    calls_total: int
    wait_s_total: float
    deaths_total: int


class Pool:
    """At most `size` processes, for calls or for leases. Used on one event loop; starts nothing before it is needed.

    A session whose calls hold no process never waits for those of others: its first is one more than there may be.
    """

    def __init__(self, size: int, name: str = "environments") -> None:
        self._size = size
        self._name = name
        self._processes: list[Process] = []
        self._line: Line[Process] = Line()
        self._calls = 0
        self._waited_s = 0.0
        self._deaths = 0
        self._shared: dict[int, tuple[Any, Shared]] = {}
        self._memory: int | None = None
        self._nursery: Nursery | None = None
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def stats(self) -> PoolStats:
        return PoolStats(len(self._alive()), len(self._line), self._calls, self._waited_s, self._deaths)

    async def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        deadline: float | None = None,
        *,
        owner: Owner = NOBODY,
        wait: float | None = None,
    ) -> Any:
        """`function(*args)` in a process where nothing else runs meanwhile; what it leaves running there is killed.

        function: one that can be imported by its name; a coroutine function too. args, and what it returns: plain
        values (numbers, text, bytes, collections, arrays, classes of ours), the latter of at most MAX_RESULT bytes.
        deadline: seconds from its start. wait: seconds until then, for a process to be free and up.
        Raises NoProcess after `wait`, TimeoutError after `deadline`, Reported (what it raised, or why it returned
        nothing usable) and ProcessDied.
        """
        place = self._line.join(owner)
        try:
            self._serve()
            process = await self._within(wait, place)
            return await asyncio.wait_for(process.run(function, args, grace=0.0), deadline)
        finally:
            self._leave(place)

    async def lease(self) -> Process:
        """The process with the fewest users, a new one where all have some and there may be more.

        Where a user has only to close it counts less: the next one shares its process rather than one at work.
        To be given back to `release`. Raises ProcessDied, OSError.
        """
        process = self._free()
        if process is None:
            process = min(self._alive(), key=lambda process: (process.load - process.closing, process.load))
        process.load += 1
        try:
            await process.ready()
        except BaseException:
            self.release(process)
            raise
        return process

    def release(self, process: Process) -> None:
        process.load -= 1

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
        self._serve()
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

    async def _within(self, wait: float | None, place: Place[Process]) -> Process:
        try:
            async with asyncio.timeout(wait):
                process = await place.got
                await process.ready()
        except TimeoutError:
            why = f"{self._size} are busy and {len(self._line)} calls wait; --env-processes says how many there may be"
            if not place.got.cancelled():
                why = "one was there, and not up yet"
            raise NoProcess(f"no process of {self._name} was free within {wait:g} s: {why}") from None
        self._calls += 1
        self._waited_s += time.monotonic() - place.since
        return process

    def _serve(self) -> None:
        """Give what is free to those that wait for it."""
        while (place := self._line.first()) is not None:
            if place.got.done():  # cancelled, and it does not know yet
                self._line.leave(place)
                continue
            try:
                process = self._free(more=self._line.holds(place.owner.session) == 0)
            except (OSError, ProcessDied) as error:
                self._line.leave(place)
                place.got.set_exception(error)
                continue
            if process is None:
                return
            self._line.take(place)
            process.load += 1
            place.got.set_result(process)

    def _leave(self, place: Place[Process]) -> None:
        """Its call is over, or given up, perhaps while it waited."""
        self._line.leave(place)
        got = place.got
        if not got.done() or got.cancelled() or got.exception() is not None:
            return
        process = got.result()
        if process.leaves_children:
            process.kill("killed, since a call left processes behind")
        process.load -= 1
        self._line.give_back(place.owner)
        if len(self._alive()) > self._size:
            asyncio.get_running_loop().call_later(SPARE_S, self._trim)
        self._serve()

    def _trim(self) -> None:
        """End those that are more than there may be, and idle."""
        alive = self._alive()
        idle = [process for process in alive if process.load == 0]
        for process in idle[: max(0, len(alive) - self._size)]:
            self._processes.remove(process)
            process.kill("one more than there may be")

    def _free(self, *, more: bool = False) -> Process | None:
        """One that nobody uses, where one more may be used. more: also where not."""
        if self._closed:
            raise ProcessDied(f"{self._name}: there are no more processes")
        alive = self._alive()
        idle = [process for process in alive if process.load == 0]
        if len(alive) - len(idle) >= self._size and not more:
            return None
        return idle[0] if idle else self._start()

    def _alive(self) -> list[Process]:
        return [process for process in self._processes if not process.died.done()]

    def _start(self) -> Process:
        if self._nursery is None or not self._nursery.alive:
            self._nursery = Nursery((self._descriptor(),))
        process = Process(f"process of {self._name}", self._nursery)
        self._processes.append(process)
        process.died.add_done_callback(lambda died: self._bury(process, died.result()))
        return process

    def _bury(self, process: Process, reason: str) -> None:
        if process not in self._processes:
            return
        self._processes.remove(process)
        if not self._closed:
            self._deaths += 1
            log.warning("%s", reason)
        self._serve()

    def _descriptor(self) -> int:
        if self._memory is None:
            self._memory = os.memfd_create("shared values")
        return self._memory
