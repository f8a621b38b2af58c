"""A process for foreign code, as the event loop sees it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from rollout.environments.errors import NotImported, ProcessDied, Reported
from rollout.environments.frames import MAX_RESULT, MAX_TEXT, NotPlain, frame, plain, read_frame
from rollout.environments.host import READY, REPLY, Forget, Interrupt, Message, Run, imported
from rollout.environments.nursery import Nursery
from rollout.environments.output import Output
from rollout.environments.warden import CODE, PID

log = logging.getLogger(__name__)

GRACE_S: Final = 0.5
"""How long a call that was given up may take to end before its process is killed."""
EXIT_S: Final = 1.0
"""How long the exit code of a process may take after its end of the connection has closed."""
MAX_FRAME: Final = REPLY.size + max(MAX_RESULT, 8 * MAX_TEXT)


class Process:
    """It inherits nothing of ours but its end of two sockets; its stdin is at its end.

    It ends with this process, however that ends, and everything that it started ends with it. Made on the event loop.
    pid: of the outer of its two processes, once it is up. load: how many use it; closing: those of them that have
    only to close. idle_since: `time.monotonic()`, where there are none. spoiled: its last call left processes that
    still run, or standard streams closed.
    up: ends when it takes calls, and never where it dies before. died: ends with how, when it is gone.
    """

    def __init__(self, name: str, nursery: Nursery) -> None:
        """Raises OSError where no process can be started."""
        loop = asyncio.get_running_loop()
        self.name = name
        self.pid = 0
        self.load = 0
        self._alone = False
        self.closing = 0
        self.idle_since = 0.0
        self.spoiled = False
        self.up: asyncio.Future[bytes] = loop.create_future()
        self.died: asyncio.Future[str] = loop.create_future()
        self._calls = {READY: self.up}
        self._numbers = itertools.count(READY + 1)
        self._imports: dict[int, asyncio.Task[None]] = {}
        self._lifeline, theirs = socket.socketpair()
        self._connection, connection = socket.socketpair()
        output, their_output = os.pipe()
        try:
            nursery.start(theirs.fileno(), connection.fileno(), their_output)
        except OSError:
            for ours in (self._lifeline, self._connection):
                ours.close()
            os.close(output)
            raise
        finally:
            for end in (theirs, connection):
                end.close()
            os.close(their_output)
        self._lifeline.setblocking(False)
        self._output = Output(output, name)
        self._work = [loop.create_task(work) for work in (self._talk(), self._watch())]

    def __str__(self) -> str:
        return f"{self.name} {self.pid}"

    @property
    def is_up(self) -> bool:
        return self.up.done() and not self.died.done()

    async def ready(self) -> None:
        """Until it takes calls. Raises ProcessDied."""
        await asyncio.wait((self.up, self.died), return_when=asyncio.FIRST_COMPLETED)
        self._must_live()

    async def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        of: int | None = None,
        keep: int | None = None,
        grace: float = GRACE_S,
    ) -> Any:
        """Call `function` there (see `Run`), once it is ready. Returns plain values.

        Cancelled, the call is interrupted, and where that does not end it within `grace` seconds (or grace is 0) the
        process is killed.
        Raises Reported, ProcessDied, and what pickle raises for what cannot be sent.
        """
        payload = pickle.dumps((function, tuple(args)), protocol=5)
        self._must_live()
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(Run(number, payload, of, keep))
        try:
            await asyncio.wait((answer,))
        except asyncio.CancelledError:
            if not answer.done():
                await self._interrupt(number, answer, grace)
            answer.exception()  # nobody else will look at it
            raise
        return plain_or_reported(answer.result())

    async def imports(self, function: Callable[..., Any]) -> None:
        """Until the module of `function` is there: that takes as long as it takes, and is no part of a call.

        One import for all that wait for it, which cannot be interrupted: whoever gives up leaves it to the others, or
        the process is killed where nobody else uses it.
        Raises NotImported, ProcessDied.
        """
        key = id(function)
        if (importing := self._imports.get(key)) is None:
            importing = self._imports[key] = asyncio.get_running_loop().create_task(self.run(imported, (function,)))
            importing.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to ask
        try:
            if not importing.done():
                await asyncio.wait((importing,))
            importing.result()
        except asyncio.CancelledError:
            if self.load <= 1 and not importing.done():
                self.kill("killed, since an import in it was given up")
            raise
        except Reported as error:
            if self._imports.get(key) is importing:  # the next one may be luckier
                del self._imports[key]
            raise NotImported(f"it cannot be imported in a process: {error}") from error
        finally:
            del importing  # its error, if it has one, names this frame

    def next_kept(self) -> int:
        """A number under which nothing is kept yet."""
        return next(self._numbers)

    def forget(self, kept: int) -> None:
        if not self.died.done():
            self._send(Forget(kept))

    def add_user(self) -> None:
        """One more of `load`. Of its death none is told what was printed before, nor, where they are several, since."""
        self.load += 1
        self._alone = self.load == 1
        if self._alone:
            self.forget_output()

    def forget_output(self) -> None:
        """Should it die, what it printed until now is not to be told."""
        self._output.forget()

    def kill(self, reason: str) -> None:
        """And everything that it started. Whoever waits for it gets ProcessDied now."""
        if not self.died.done():
            with suppress(OSError):
                self._lifeline.shutdown(socket.SHUT_WR)
                if self.pid:
                    os.kill(self.pid, signal.SIGCONT)  # foreign code may have stopped it
        self._end(reason)

    async def gone(self) -> None:
        """Until nothing is left of it."""
        await asyncio.wait(self._work)

    def _must_live(self) -> None:
        if self.died.done():
            raise ProcessDied(str(self), self.died.result())

    def _send(self, message: Message) -> None:
        self._writer.write(frame(pickle.dumps(message, protocol=5)))

    async def _interrupt(self, number: int, answer: asyncio.Future[bytes], grace: float) -> None:
        try:
            if grace > 0:
                self._send(Interrupt(number))
                await asyncio.wait((answer,), timeout=grace)
        finally:
            if not answer.done():
                self.kill("killed, since a call in it was given up and did not end")

    async def _talk(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        try:
            while True:
                self._take(await read_frame(reader, MAX_FRAME))
        except (asyncio.IncompleteReadError, OSError):
            await asyncio.wait((self.died,), timeout=EXIT_S)
            self.kill("it closed its connection")
        except Exception as error:
            log.warning("%s sent something unreadable", self.name, exc_info=error)
            self.kill("killed, since it sent something unreadable")
        finally:
            self._writer.close()

    def _take(self, body: bytes) -> None:
        number, returned, self.spoiled = REPLY.unpack_from(body)
        answer = self._calls.pop(number, None)
        if answer is None or answer.done():  # given up, or it came while the process was being ended
            return
        if returned:
            answer.set_result(body[REPLY.size :])
        else:
            summary, _, details = body[REPLY.size :].decode(errors="replace").partition("\0")
            error = Reported(summary)
            if details:
                error.add_note(details)
            answer.set_exception(error)

    async def _watch(self) -> None:
        """The lifeline says who it is and how it ended, in lines, and closes when nothing is left of it."""
        loop = asyncio.get_running_loop()
        said = b""
        try:
            while chunk := await loop.sock_recv(self._lifeline, 256):
                *lines, said = (said + chunk).split(b"\n")
                for line in lines:
                    self._hear(line.decode())
        except OSError as error:
            log.warning("the lifeline of %s broke: %s", self.name, error)
        self._end("gone" if self.up.done() else "gone before it was up")
        self._lifeline.close()
        self._output.close()

    def _hear(self, line: str) -> None:
        what, _, value = line.partition(" ")
        if what == PID:
            self.pid = int(value)
        elif what == CODE:
            self._end(self._how(int(value)))
        else:
            self._end(line)

    def _how(self, code: int) -> str:
        how = f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
        said = self._output.tail()
        if not said:
            return how
        if self._alone or not self.up.done():
            return f"{how}; the end of its output: {said}"
        log.warning("the end of the output of %s, which several used: %s", self, said)
        return f"{how}; the worker's log has the end of its output, which may be that of others"

    def _end(self, how: str) -> None:
        if self.died.done():
            return
        self.died.set_result(how)
        calls, self._calls = self._calls, {}
        for number, answer in calls.items():
            if number != READY and not answer.done():
                answer.set_exception(ProcessDied(str(self), how))


def plain_or_reported(data: bytes) -> Any:
    try:
        return plain(data)
    except NotPlain as error:
        raise Reported(f"it returned a {error}, which is no plain value") from None
    except Exception as error:
        raise Reported(f"what it returned cannot be read: {error!r}") from None
