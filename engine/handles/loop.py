"""Commands in, reports out, around an engine: the same in a thread and in a process of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from engine.engine import Engine
from engine.errors import RequestError
from engine.handle import (
    Abort,
    Command,
    CommitWeights,
    DiscardWeights,
    Pause,
    Ping,
    PrepareWeights,
    ReleaseKv,
    Report,
    Resume,
    Submit,
)
from engine.request import Completion, Failure, Request, refusal
from engine.step import WeightStore
from engine.weights.reload import PrepareEnded, Reload

log = logging.getLogger(__name__)


class Close:
    """The last thing put into an inbox."""


Inbox = SimpleQueue[Command | PrepareEnded | Close]

REPORT_EVERY: Final = 0.25
"""Seconds after which a running engine reports its gauges even if nothing ended."""


class EngineLoop:
    """Runs an engine until `Close`: takes every command that has come, makes one step, reports once at most.

    deliver: gets each `Report`, on the thread of `run`. An exception in the loop ends it, reported as `died`.
    """

    def __init__(
        self,
        engine: Engine,
        weights: WeightStore,
        inbox: Inbox,
        deliver: Callable[[Report], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._updates = Reload(engine, weights, inbox.put, clock)
        self._inbox = inbox
        self._deliver = deliver
        self._clock = clock
        self._completions: list[Completion] = []
        self._reported_at = clock()
        self._reported = engine.stats()
        self._asked = False

    def run(self) -> None:
        try:
            while self._take_commands():
                self._updates.advance()
                self._completions += self._engine.step()
                self._report()
        except Exception as error:
            log.exception("the engine's loop broke")
            died = Failure("engine_dead", f"{type(error).__name__}: {error}")
            ended = tuple(self._completions + self._engine.take_ended())
            self._deliver(Report(ended, tuple(self._updates.take_reports()), self._engine.stats(), died))
        self._updates.close()

    def _take_commands(self) -> bool:
        """Handle all that has come; block while there is nothing to do. False: close."""
        try:
            item = self._inbox.get(timeout=self._wait())
            while not isinstance(item, Close):
                self._handle(item)
                item = self._inbox.get_nowait()
        except Empty:
            return True
        return False

    def _wait(self) -> float | None:
        if self._engine.has_work:
            return 0.0
        deadline = self._updates.deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def _handle(self, item: Command | PrepareEnded) -> None:
        match item:
            case Submit(requests):
                for request in requests:
                    self._add(request)
            case Abort(request_ids, reason):
                for request_id in request_ids:
                    self._engine.abort(request_id, reason)
            case ReleaseKv(keys):
                self._engine.release_kv(keys)
            case PrepareWeights():
                self._updates.prepare(item)
            case PrepareEnded():
                self._updates.prepare_ended(item)
            case CommitWeights():
                self._updates.commit(item)
            case DiscardWeights():
                self._updates.discard(item)
            case Ping():
                self._asked = True
            case Pause():
                self._engine.pause()
            case Resume():
                self._engine.resume()

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except RequestError as error:
            self._completions.append(refusal(request, Failure(error.code, error.message, error.field)))

    def _report(self) -> None:
        """Deliver what there is to say, and the gauges when asked, before going to sleep and once in a while."""
        weights, completions, now = self._updates.take_reports(), self._completions, self._clock()
        asked, self._asked = self._asked, False
        news = bool(asked or completions or weights)
        if not news and now - self._reported_at < REPORT_EVERY and self._engine.has_work:
            return
        stats = self._engine.stats()
        if news or stats != self._reported:
            self._completions, self._reported_at, self._reported = [], now, stats
            self._deliver(Report(tuple(completions), tuple(weights), stats))
