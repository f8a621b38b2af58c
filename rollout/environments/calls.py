"""One call into environment code, which may raise anything, block, or never return."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollout.environments.errors import NoProcess


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    error: BaseException


Outcome = Returned | Raised


class Interrupted(BaseException):
    """Raised in a thread whose call was given up."""


class _Interruption:
    """Of one call on a thread: at most one, between `begin` and `end` alone, for elsewhere nobody would catch it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._asked = False

    def begin(self) -> None:
        """On the thread. Raises Interrupted where that was asked for before."""
        with self._lock:
            self._thread = threading.get_ident()
            if self._asked:
                raise Interrupted

    def end(self) -> None:
        """On the thread. Raises Interrupted where that was on its way; called again, it does not."""
        with self._lock:
            self._thread = None
            _raise_in(threading.get_ident(), None)

    def ask(self) -> None:
        with self._lock:
            if not self._asked and self._thread is not None:
                _raise_in(self._thread, Interrupted)
            self._asked = True


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """At its next instruction. None: takes back what was not raised yet."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


class Call:
    """A call that has begun. `task` ends with what came of it; it never raises, and cancelling it is giving up.

    A coroutine function runs on the loop. Anything else gets a daemon thread of its own: in a pool a few hung calls
    would stop all other environments, and they would hold up the worker's exit until they return.
    """

    def __init__(self, method: Callable[..., Any], *args: Any) -> None:
        self._method = method
        self._args = args
        self._thread: threading.Thread | None = None
        self._interruption = _Interruption()
        self.task: asyncio.Task[Outcome] = asyncio.get_running_loop().create_task(self._outcome())

    @property
    def running(self) -> bool:
        """Is the environment's code still at it? A thread goes on after the call was given up."""
        return not self.task.done() or (self._thread is not None and self._thread.is_alive())

    def interrupt(self) -> None:
        """Ask the call to end: `task` then ends when it has.

        Python code on a thread gets `Interrupted` at its next instruction; one that waits in a system call or in a
        library written in C does not notice before that returns.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            self.task.cancel()
        else:
            self._interruption.ask()

    async def result(self) -> Any:
        """What it returned; raises what it raised. Cancelled, it is interrupted."""
        try:
            outcome = await self.task
        except BaseException:
            self.interrupt()
            raise
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome.value

    async def _outcome(self) -> Outcome:
        try:
            if inspect.iscoroutinefunction(self._method):
                return Returned(await self._method(*self._args))
            outcome = await self._on_thread()
            if isinstance(outcome, Returned) and inspect.isawaitable(outcome.value):
                return Returned(await outcome.value)
            return outcome
        except BaseException as error:
            # SystemExit or KeyboardInterrupt out of a task would end the loop, and with it everyone's trajectories.
            del self  # which holds the task, which will hold the error, which keeps this frame
            return Raised(error)

    async def _on_thread(self) -> Outcome:
        loop = asyncio.get_running_loop()
        method, args, interruption = self._method, self._args, self._interruption
        ended: asyncio.Future[None] = loop.create_future()
        outcomes: list[Outcome] = []
        context = contextvars.copy_context()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        # An error keeps the frames that it went through, and their callers: none of them may keep it in turn.
        def work() -> None:
            try:
                try:
                    interruption.begin()
                    outcomes.append(Returned(context.run(method, *args)))
                except BaseException as error:
                    if not ended.done():
                        outcomes.append(Raised(error))
                interruption.end()
            except Interrupted as late:
                if not ended.done():
                    outcomes.append(Raised(late))
                interruption.end()
            with suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(end)

        self._thread = threading.Thread(target=work, name="environment", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise NoProcess(f"no thread could be started: {error}") from error
        del self  # as above
        try:
            await ended
            return outcomes.pop()
        finally:
            outcomes.clear()
