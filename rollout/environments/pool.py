"""Processes for foreign code, and who gets one.

pool = Pool(8, "tools")
text = await pool.call(run_tool, (name, arguments), deadline=5.0)   # alone in its process, for a function
process = await pool.lease()                                        # beside others, for an object kept there
pool.release(process)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollout.environments.errors import NoProcess, ProcessDied, Reported
from rollout.environments.line import NOBODY, Line, Owner, Place
from rollout.environments.processes import Process
from rollout.environments.stock import RETRY_S, Shared, Stock

__all__ = ["NOBODY", "NoProcess", "Owner", "Pool", "PoolStats", "ProcessDied", "Reported", "Shared"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Now: processes, calls that wait for one. Since the start: calls that got one, seconds for which those waited,
    calls and leases that got none in time, processes that died or had to be killed."""

    processes: int
    calls_waiting: int
    calls_total: int
    wait_s_total: float
    unserved_total: int
    deaths_total: int


class Pool:
    """At most `size` processes, for calls or for leases. Used on one event loop; starts nothing before it is needed.

    The last free process is for a session whose calls hold none: of two it never waits for the other's.
    """

    def __init__(self, size: int, name: str = "environments") -> None:
        self._name = name
        self._stock = Stock(size, name, self._serve)
        self._line: Line[Process] = Line()
        self._calls = 0
        self._waited_s = 0.0
        self._unserved = 0

    @property
    def processes(self) -> tuple[Process, ...]:
        return tuple(self._stock.alive)

    @property
    def stats(self) -> PoolStats:
        stock = self._stock
        return PoolStats(len(stock.alive), len(self._line), self._calls, self._waited_s, self._unserved, stock.deaths)

    async def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        deadline: float | None = None,
        *,
        owner: Owner = NOBODY,
        wait: float | None = None,
        imports: Callable[..., Any] | None = None,
    ) -> Any:
        """`function(*args)` in a process where nothing else runs meanwhile; what it leaves running there is killed.

        function: one that can be imported by its name; a coroutine function too. args, and what it returns: plain
        values (numbers, text, bytes, collections, arrays, classes of ours), the latter of at most MAX_RESULT bytes.
        deadline: seconds from its start. wait: seconds until then, for a process to be free and up. imports: has to be
        imported there before it starts.
        Raises NoProcess after `wait`, NotImported, TimeoutError after `deadline`, Reported (what it raised, or why it
        returned nothing usable) and ProcessDied.
        """
        place = self._line.join(owner)
        try:
            self._serve()
            async with self._within(wait):
                process = await place.got
                if imports is not None:
                    await process.imports(imports)
            self._calls += 1
            self._waited_s += time.monotonic() - place.since
            process.forget_output()  # an import's: the first call in a process is told what all are
            async with asyncio.timeout(deadline):
                return await process.run(function, args, grace=0.0)
        finally:
            self._leave(place)

    async def lease(self, wait: float | None = None) -> Process:
        """The process with the fewest users, a new one where all have some and there may be more.

        Where a user has only to close it counts less: the next one shares its process rather than one at work.
        To be given back to `release`. wait: seconds for one to be up. Raises NoProcess.
        """
        async with self._within(wait):
            while True:
                if (process := self._least_used()) is None:
                    await asyncio.sleep(RETRY_S)
                    continue
                process.add_user()
                try:
                    await process.ready()
                    return process
                except ProcessDied:
                    self.release(process)  # before it was up: that is no fault of who wants it
                except BaseException:
                    self.release(process)
                    raise

    def release(self, process: Process) -> None:
        """Spoiled, it is killed when nobody uses it any more."""
        self._stock.put_back(process)
        if process.load == 0:
            _kill_spoiled(process)

    def share(self, value: Any) -> Shared:
        """The same value is kept once. It lives as long as the pool."""
        return self._stock.share(value)

    async def close(self) -> None:
        """Kill them all. Idempotent."""
        self._stock.closed = True
        self._serve()
        await self._stock.close()

    @asynccontextmanager
    async def _within(self, wait: float | None) -> AsyncIterator[None]:
        """Raises NoProcess in place of TimeoutError."""
        try:
            async with asyncio.timeout(wait):
                yield
        except TimeoutError:
            self._unserved += 1
            raise NoProcess(f"no process of {self._name} could be had within {wait:g} s: {self._why()}") from None

    def _why(self) -> str:
        stock = self._stock
        if stock.refused:
            return f"none can be started ({stock.refused}), and {stock.busy} are busy"
        return (
            f"{stock.busy} of {stock.size} are busy, {stock.starting} not up yet, and {len(self._line)} calls wait; "
            "--env-processes says how many there may be"
        )

    def _serve(self) -> None:
        """Give what is free to those that wait for it, and start what is missing."""
        while (place := self._line.first()) is not None:
            if place.got.done():  # cancelled, and it does not know yet
                self._line.leave(place)
                continue
            if self._stock.closed:
                self._line.leave(place)
                place.got.set_exception(self._over())
                continue
            process = self._free(newcomer=not self._line.holds(place.owner.session))
            if process is None:
                return
            self._line.take(place)
            process.add_user()
            place.got.set_result(process)

    def _free(self, *, newcomer: bool) -> Process | None:
        """An idle one. newcomer: for a session that holds none, which may have the last one too."""
        stock = self._stock
        left = stock.size - stock.busy
        room = max(left - 1, min(left, 1) if newcomer else 0)
        if room > 0 and (idle := stock.idle()) is not None:
            return idle
        while stock.starting < min(room, len(self._line)) and stock.start() is not None:
            pass
        return None

    def _leave(self, place: Place[Process]) -> None:
        """Its call is over, or given up, perhaps while it waited."""
        self._line.leave(place)
        got = place.got
        if not got.done() or got.cancelled() or got.exception() is not None:
            return
        process = got.result()
        _kill_spoiled(process)
        self._line.give_back(place.owner)
        self._stock.put_back(process)
        self._serve()

    def _least_used(self) -> Process | None:
        """For a lease. None: there is none, and none can be started now. Raises NoProcess where there are no more."""
        if self._stock.closed:
            raise self._over()
        if (process := self._stock.idle() or self._stock.start()) is not None:
            return process
        alive = (process for process in self._stock.alive if not process.died.done())
        return min(
            alive, key=lambda process: (process.spoiled, process.load - process.closing, process.load), default=None
        )

    def _over(self) -> NoProcess:
        return NoProcess(f"{self._name}: there are no more processes")


def _kill_spoiled(process: Process) -> None:
    if process.spoiled:
        process.kill("killed, since a call left processes behind, or standard streams closed")
