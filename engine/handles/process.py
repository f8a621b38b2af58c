"""The engine in a process of its own: the default on a GPU, so that nothing the worker does delays a step."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Final

from engine.errors import EngineError
from engine.handle import Command, EngineInfo, EngineStats, Report
from engine.handles.child import WORKERS_SIGNALS, Message
from engine.handles.log_line import LogLine
from engine.handles.loop import Close
from engine.handles.pipe import Pipe, taken
from engine.request import Failure
from engine.start.recipe import EngineRecipe

log = logging.getLogger(__name__)

EXIT_S: Final = 0.5
"""How long the exit code of a process may take after its end of the pipe has closed."""
GONE_S: Final = 5.0
"""How long a process that stopped may take to be gone: the driver frees the memory of the device first."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The process is gone. Put among the commands, so that it is told from `start` on, as everything is."""

    failure: Failure


class ProcessEngine:
    """`EngineHandle` around an engine that a fresh interpreter builds (no fork: threads and CUDA survive none).

    The process ends with this one, however that ends; it ignores SIGINT and SIGTERM. If it dies first, that is reported
    as `died`. What it logs is logged here, progress of the start included.
    """

    info: EngineInfo

    def __init__(self, recipe: EngineRecipe) -> None:
        """Returns when the engine is ready; until then an exception (a signal's, say) ends the process.

        Raises the `EngineError` of the build; one of code "internal" for any other end before it is ready.
        """
        self._pipe, theirs = Pipe.pair()
        self._outbox: SimpleQueue[Command | Close | Ended] = SimpleQueue()
        self._stats = EngineStats()
        self._deliver: Callable[[Report], None] = lambda _: None
        self._closed = False
        self._stopped = Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._sender = Thread(target=self._send_all, name="engine commands", daemon=True)
        ready: Future[EngineInfo] = Future()
        # Linux counts the thread that started a process as its parent, so that one has to stay: it is the reader.
        self._reader = Thread(target=self._run, args=(recipe, theirs, ready), name="engine", daemon=True)
        self._reader.start()
        try:
            self.info = ready.result()
        except BaseException:
            self.close(0.0)
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, deliver: Callable[[Report], None]) -> None:
        """`deliver` may take its time: no step waits for it. Called once."""
        if self._sender.ident is not None:
            raise RuntimeError("the engine was started before")
        self._deliver = deliver
        self._sender.start()

    def send(self, command: Command) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        self._outbox.put(command)

    def close(self, timeout: float) -> bool:
        """False if the process had to be killed. Returns when it is gone, which the device's driver can draw out."""
        if not self._closed:
            self._closed = True
            self._outbox.put(Close())
            if self._sender.ident is None:
                self._sender.start()
        stopped = self._stopped.wait(timeout)
        if not stopped:
            self._kill()
        self._reader.join(GONE_S)
        self._sender.join(GONE_S)
        if not (self._reader.is_alive() or self._sender.is_alive()):
            self._pipe.close()
        return stopped

    # The reader's thread.

    def _run(self, recipe: EngineRecipe, theirs: Pipe, ready: Future[EngineInfo]) -> None:
        try:
            process = self._process = _start(theirs)
        except Exception as error:
            self._stopped.set()
            ready.set_exception(error)
            return
        finally:
            theirs.close()
        if self._closed:
            # It was given up before there was anything to kill.
            process.kill()
        try:
            with suppress(OSError):
                self._pipe.send([recipe, logging.getLogger().getEffectiveLevel()])
            for message in self._pipe.receive():
                self._take(message, ready)
        except Exception:
            log.exception("the engine process is given up")
            process.kill()
        left = self._stopped.is_set()
        self._stopped.set()
        failure = Failure("engine_dead", _end_of(process))
        if not ready.done():
            ready.set_exception(EngineError(f"{failure.message} before it was ready"))
        if not left:
            self._outbox.put(Ended(failure))
        process.kill()
        process.wait()

    def _take(self, message: Message, ready: Future[EngineInfo]) -> None:
        match message:
            case LogLine():
                message.log()
            case EngineInfo():
                ready.set_result(message)
            case EngineError():
                ready.set_exception(message)
            case Close():
                self._stopped.set()
            case Report():
                self._stats = message.stats
                self._deliver(message)

    # The sender's thread.

    def _send_all(self) -> None:
        """Pass commands on until `Close`."""
        batch: list[Command | Close | Ended] = []
        while not any(isinstance(item, Close) for item in batch):
            batch = taken(self._outbox)
            self._pass_on([item for item in batch if not isinstance(item, Ended)])
            for item in batch:
                if isinstance(item, Ended):
                    self._deliver(Report(stats=self._stats, died=item.failure))

    def _pass_on(self, commands: list[Command | Close]) -> None:
        try:
            self._pipe.send(commands)
        except OSError:
            # It is gone; the reader sees that too, and says so.
            pass
        except Exception:
            log.exception("the engine process cannot be told")
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()


def _start(theirs: Pipe) -> subprocess.Popen[bytes]:
    """A child that finds the modules that we find, with its end of the pipe and nothing else of ours."""
    # A child is born with the mask of the thread that starts it: until it ignores what is the worker's, that waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, WORKERS_SIGNALS)
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    code = f"from engine.handles.child import main; main({theirs.fileno()}, {os.getpid()})"
    return subprocess.Popen(
        [sys.executable, "-P", "-X", "faulthandler", "-c", code],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        return "the engine process closed its pipe"
    if code < 0:
        return f"the engine process was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"the engine process ended with exit code {code}"
