"""The inner of the two processes behind a `Process`: it calls functions, and keeps objects between calls.

One event loop: coroutine functions run on it, anything else on a thread of its own (calls.py), so that calls that
wait do not wait for each other. What a call needs is imported in that call.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import socket
import struct
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final

from rollout.environments.calls import Call, Outcome, Raised, Returned
from rollout.environments.errors import describe, details
from rollout.environments.frames import MAX_TEXT, TooLarge, bounded_pickle, frame, read_frame
from rollout.environments.warden import children

REPLY = struct.Struct("<QBB")
"""Number of the call, did it return, did it spoil the process for the next one."""
NOTHING: Final = pickle.dumps(None)
READY: Final = 0
"""Number of the reply that says that this process is up."""


@dataclass(frozen=True, slots=True)
class Run:
    """Call a function. payload: the pickled (function, args).

    of: the object kept under that number is its first argument. keep: what it returns is kept under that number and
    not sent.
    """

    number: int
    payload: bytes
    of: int | None = None
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Of the call with that number."""

    number: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The object kept under that number."""

    kept: int


Message = Run | Interrupt | Forget


def main(connection: int) -> None:
    """connection: our end of a stream socket. Returns when the other end is gone."""
    asyncio.run(Host(socket.socket(fileno=connection)).serve())


class Host:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._calls: dict[int, Call] = {}
        self._kept: dict[int, Any] = {}

    async def serve(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._reply(READY, True, NOTHING)
        try:
            while True:
                message: Message = pickle.loads(await read_frame(reader))
                match message:
                    case Run():
                        call = self._calls[message.number] = Call(self._function(message))
                        call.task.add_done_callback(functools.partial(self._ended, message))
                    case Interrupt():
                        if (found := self._calls.get(message.number)) is not None:
                            found.interrupt()
                    case Forget():
                        self._kept.pop(message.kept, None)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _function(self, run: Run) -> Any:
        def work() -> Any | Awaitable[Any]:
            function, args = pickle.loads(run.payload)
            return function(*args) if run.of is None else function(self._kept[run.of], *args)

        return work

    def _ended(self, run: Run, task: asyncio.Task[Outcome]) -> None:
        del self._calls[run.number]
        outcome = Raised(asyncio.CancelledError()) if task.cancelled() else task.result()
        if isinstance(outcome, Returned) and run.keep is not None:
            self._kept[run.keep] = outcome.value
            outcome = Returned(None)
        if isinstance(outcome, Returned):
            try:
                returned, payload = True, bounded_pickle(outcome.value)
            except TooLarge:
                returned, payload = False, b"what it returned is too large to be sent"
            except BaseException as error:
                returned, payload = False, report(error)
        else:
            returned, payload = False, report(outcome.error)
        intact = _standard_streams()
        # Where objects are kept, children may be theirs.
        spoiled = not intact or (not self._kept and bool(children()))
        self._reply(run.number, returned, payload, spoiled=spoiled)

    def _reply(self, number: int, returned: bool, payload: bytes, *, spoiled: bool = False) -> None:
        self._writer.write(frame(REPLY.pack(number, returned, spoiled), payload))


def _standard_streams() -> bool:
    """Are they open still? What is opened next would be in their place. What they hold back is the ended call's."""
    try:
        for printed in (sys.stdout, sys.stderr):
            printed.flush()
        return all(os.fstat(stream.fileno()) for stream in (sys.stdin, sys.stdout, sys.stderr))
    except Exception:  # closed, or something else was put there
        return False


def imported(_: Any) -> None:
    """What came as an argument came by its name, so its module is there now."""


def report(error: BaseException) -> bytes:
    """What the worker learns of an error, as UTF-8: its description, a zero, its traceback. Each is bounded."""
    return b"\0".join(text[:MAX_TEXT].encode(errors="replace") for text in (describe(error), details(error)))
