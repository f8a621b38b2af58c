"""The engine's own process: it builds an engine, runs its loop, and lives no longer than its parent.

Neither the parent nor the pipe ever holds up a step: one thread reads commands into the loop's inbox, another sends
what the loop reports.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Final

from engine.errors import EngineError
from engine.handle import Command, EngineInfo, Report
from engine.handles.log_line import LogLine
from engine.handles.loop import Close, EngineLoop, Inbox
from engine.handles.pipe import Pipe, taken
from engine.start.collector import spare_the_collector
from engine.start.recipe import EngineRecipe

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
WORKERS_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""Terminals and service managers send them to the whole group, and the worker needs its engine in order to drain."""


Message = EngineInfo | EngineError | Report | LogLine | Close
"""What this process tells its parent."""

Outbox = SimpleQueue[Message]


def main(fd: int, parent: int) -> None:
    """fd: our end of the pipe. What comes over it: the recipe, the level of the root logger, then commands.

    Answered by log lines at any time, once by an `EngineInfo` or an `EngineError`, then by reports, last by `Close`.
    """
    _die_with(parent)
    for number in WORKERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKERS_SIGNALS)
    pipe = Pipe(Connection(fd))
    messages = pipe.receive()
    recipe, level = next(messages), next(messages)
    inbox: Inbox = SimpleQueue()
    outbox: Outbox = SimpleQueue()
    logging.basicConfig(handlers=[_Forward(outbox)], level=level)
    logging.captureWarnings(True)
    Thread(target=_read, args=(messages, inbox), name="commands", daemon=True).start()
    sender = Thread(target=_send, args=(outbox, pipe), name="reports", daemon=True)
    sender.start()
    _serve(recipe, inbox, outbox)
    outbox.put(Close())
    sender.join()


def _serve(recipe: EngineRecipe, inbox: Inbox, outbox: Outbox) -> None:
    log.info("process %d builds the engine", os.getpid())
    try:
        built = recipe.build()
    except EngineError as error:
        outbox.put(error)
    except Exception as error:
        log.exception("the engine cannot be built")
        outbox.put(EngineError(f"{type(error).__name__}: {error}"))
    else:
        spare_the_collector()
        outbox.put(built.info)
        EngineLoop(built.engine, built.weights, inbox, outbox.put).run()


def _read(messages: Iterator[Command], inbox: Inbox) -> None:
    """Commands into the inbox; without a parent there is nobody left to work for."""
    try:
        for command in messages:
            inbox.put(command)
    except Exception:
        traceback.print_exc()
    os._exit(1)


def _send(outbox: Outbox, pipe: Pipe) -> None:
    """What the loop says into the pipe. After `Close` the process ends at once: torch takes its time to leave."""
    code = 1
    try:
        batch: list[Message] = []
        while not any(isinstance(item, Close) for item in batch):
            batch = taken(outbox)
            pipe.send(condensed(batch))
        code = 0
    except OSError:
        pass
    except Exception:
        traceback.print_exc()
    os._exit(code)


def condensed(batch: list[Message]) -> list[Message]:
    """The same with its reports as one: a slow parent gets the sum of what it missed, and no backlog of gauges."""
    reports = [item for item in batch if isinstance(item, Report)]
    if len(reports) < 2:
        return batch
    one = Report(
        tuple(completion for report in reports for completion in report.completions),
        tuple(answer for report in reports for answer in report.weights),
        reports[-1].stats,
        reports[-1].died,
    )
    return [*(item for item in batch if not isinstance(item, Report)), one]


class _Forward(logging.Handler):
    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        self._outbox.put(LogLine.of(record))


def _die_with(parent: int) -> None:
    """Be killed when the parent ends, even if it is killed itself and we hang in a device call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
