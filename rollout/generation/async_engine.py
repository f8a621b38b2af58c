"""The engine as the worker's event loop sees it: awaitable requests, by id."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeVar

from engine.handle import (
    Abort,
    Command,
    CommitMode,
    Committed,
    CommitWeights,
    DiscardWeights,
    EngineHandle,
    EngineStats,
    Pause,
    Ping,
    Prepared,
    PrepareWeights,
    ReleaseKv,
    Report,
    Resume,
    Submit,
    WeightsFailed,
    WeightsReport,
)
from engine.request import Completion, Failure, FinishReason, Request, refusal
from engine.step import WeightsInfo
from protocols.errors import EngineDead, WeightsBusy
from rollout.generation.failures import wire_error
from rollout.generation.pace import Pace

log = logging.getLogger(__name__)

T = TypeVar("T")

ENDS_S = 0.003
"""How long a turn of the loop may take over what has ended: the client reads the first results of a step that ended
many while the worker is at the others."""


@dataclass(slots=True)
class _Waiting:
    """future: of whoever waits; once that was cancelled another one, which its end settles all the same."""

    request: Request
    future: asyncio.Future[Completion]


class AsyncEngine:
    """asyncio face of an `EngineHandle`. Everything here is called from the loop that called `start`.

    Commands wait for the end of the loop's tick and leave in order, neighbours of one kind merged: 512 trajectories
    that start together are one `Submit`, and an abort never overtakes the request that it is about.
    """

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle
        self._outbox: list[Command] = []
        self._ended: deque[tuple[_Waiting, Completion]] = deque()
        self._settling = Pace(self._settle_next, ENDS_S)
        self._requests: dict[str, _Waiting] = {}
        self._holding: set[str] = set()
        self._prepares: dict[str, asyncio.Future[WeightsInfo]] = {}
        self._commits: dict[str, asyncio.Future[Committed]] = {}
        self._stats = EngineStats()
        self._reported_at = time.monotonic()
        self._died: Failure | None = None
        self._death = asyncio.Event()

    async def start(self) -> None:
        """Start the engine (on a thread: loading may take a while). Raises what the handle's `start` raises."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._handle.start, self._deliver)

    async def close(self, timeout: float) -> bool:  # noqa: ASYNC109 (a thread waits, which no cancellation ends)
        """Stop the engine. What is still awaited ends with `engine_dead`. False if it did not stop in time."""
        self._flush()
        stopped = await asyncio.to_thread(self._handle.close, timeout)
        self._die(Failure("engine_dead", "the engine was closed"))
        return stopped

    async def generate(self, request: Request) -> Completion:
        """Exactly one completion; errors (a dead engine too) are returned, not raised.

        Requests of one loop tick travel as one `Submit`. Cancelling the caller aborts the request. A request whose
        id is still in use, by one that was cancelled, waits for its end.
        """
        while before := self._requests.get(request.id):
            await asyncio.wait([before.future])
        if self._died is not None:
            return _dead(request, self._died)
        waiting = self._requests[request.id] = _Waiting(request, self._loop.create_future())
        if request.goes_on:
            self._holding.add(request.trajectory)
        self._post(Submit((request,)))
        try:
            return await waiting.future
        except asyncio.CancelledError:
            waiting.future = self._loop.create_future()
            self.abort((request.id,), "abort_client")
            raise

    def abort(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        """End requests early; their completions still arrive, with `reason` and what was sampled."""
        if known := tuple(request_id for request_id in request_ids if request_id in self._requests):
            self._post(Abort(known, reason))

    def release_kv(self, key: str) -> None:
        """The trajectory of this key (`Request.trajectory`) has ended: its KV is of no use any more."""
        if key in self._holding:
            self._holding.remove(key)
            self._post(ReleaseKv((key,)))

    async def prepare_weights(
        self, update_id: str, path: str, version: int, checksums: Mapping[str, str] | None = None
    ) -> WeightsInfo:
        """Raises WeightsInvalid, WeightsIncomplete, WeightsBusy, EngineDead (protocols.errors)."""
        command = PrepareWeights(update_id, path, version, None if checksums is None else dict(checksums))
        return await asyncio.shield(self._promise(self._prepares, command))

    async def commit_weights(
        self,
        update_id: str,
        mode: CommitMode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: Literal["abort", "fail"] = "abort",
    ) -> Committed:
        """Raises like `prepare_weights`; then the old weights serve on."""
        command = CommitWeights(update_id, mode, drain_timeout, on_timeout)
        return await asyncio.shield(self._promise(self._commits, command))

    def discard_weights(self, update_id: str) -> None:
        self._post(DiscardWeights(update_id))

    def pause(self) -> None:
        self._post(Pause())

    def resume(self) -> None:
        self._post(Resume())

    def ping(self) -> None:
        """Ask for a report; `reported_at` tells when it has come."""
        self._post(Ping())

    @property
    def stats(self) -> EngineStats:
        """Of the last report."""
        return self._stats

    @property
    def reported_at(self) -> float:
        """`time.monotonic()` of the last report, or of the beginning."""
        return self._reported_at

    @property
    def died(self) -> Failure | None:
        return self._died

    async def wait_died(self) -> Failure:
        await self._death.wait()
        assert self._died is not None
        return self._died

    # Commands out.

    def _post(self, command: Command) -> None:
        if self._died is not None:
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        try:
            for command in _merged(commands):
                self._handle.send(command)
        except Exception as error:
            log.exception("the engine takes no command")
            self._die(Failure("engine_dead", f"the engine takes no command: {error}"))

    # Reports in.

    def _deliver(self, report: Report) -> None:
        """On a thread of the handle's."""
        try:
            self._loop.call_soon_threadsafe(self._take, report)
        except RuntimeError:
            # The loop closed while the engine was still reporting: nobody is left to tell.
            log.debug("a report came after the loop had closed")

    def _take(self, report: Report) -> None:
        self._stats = report.stats
        self._reported_at = time.monotonic()
        for completion in report.completions:
            if (waiting := self._requests.pop(completion.request_id, None)) is None:
                log.warning("a completion of the unknown request %s was dropped", completion.request_id)
            else:
                self._ended.append((waiting, completion))
        self._settling.wake()
        for weights in report.weights:
            self._take_weights(weights)
        if report.died is not None:
            self._die(report.died)

    def _settle_next(self) -> bool:
        """A step may end hundreds of turns, and each wakes a trajectory."""
        if not self._ended:
            return False
        waiting, completion = self._ended.popleft()
        if not waiting.future.cancelled():
            waiting.future.set_result(completion)
        return True

    def _take_weights(self, report: WeightsReport) -> None:
        if isinstance(report, Prepared):
            if (prepare := self._prepares.pop(report.update_id, None)) is not None:
                prepare.set_result(report.info)
        elif isinstance(report, Committed):
            if (commit := self._commits.pop(report.update_id, None)) is not None:
                commit.set_result(report)
        else:
            self._fail_weights(report)

    def _fail_weights(self, report: WeightsFailed) -> None:
        error = wire_error(report.failure)
        # An update is prepared before it is committed, so the older of the two is what failed.
        if (prepare := self._prepares.pop(report.update_id, None)) is not None:
            prepare.set_exception(error)
        elif (commit := self._commits.pop(report.update_id, None)) is not None:
            commit.set_exception(error)

    def _die(self, failure: Failure) -> None:
        if self._died is not None:
            return
        self._died = failure
        self._death.set()
        self._outbox.clear()
        requests, self._requests = self._requests, {}
        for waiting in requests.values():
            if not waiting.future.cancelled():
                waiting.future.set_result(_dead(waiting.request, failure))
        for prepare in self._prepares.values():
            prepare.set_exception(EngineDead(failure.message))
        for commit in self._commits.values():
            commit.set_exception(EngineDead(failure.message))
        self._prepares.clear()
        self._commits.clear()

    def _promise(
        self, table: dict[str, asyncio.Future[T]], command: PrepareWeights | CommitWeights
    ) -> asyncio.Future[T]:
        """What comes of the command. No frame that awaits it may name it: an error names the frames it went through."""
        if self._died is not None:
            raise EngineDead(self._died.message)
        if command.update_id in table:
            raise WeightsBusy(f"update {command.update_id} is already under way")
        future: asyncio.Future[T] = self._loop.create_future()
        # The caller may be gone when the answer comes; its error is then nobody's.
        future.add_done_callback(lambda done: done.exception())
        table[command.update_id] = future
        self._post(command)
        return future


def _merged(commands: list[Command]) -> Iterator[Command]:
    for (kind, reason), run in groupby(commands, lambda command: (type(command), getattr(command, "reason", None))):
        if kind is Submit:
            yield Submit(tuple(request for submit in run if isinstance(submit, Submit) for request in submit.requests))
        elif kind is ReleaseKv:
            yield ReleaseKv(tuple(key for release in run if isinstance(release, ReleaseKv) for key in release.keys))
        elif kind is Abort and reason is not None:
            yield Abort(
                tuple(known for abort in run if isinstance(abort, Abort) for known in abort.request_ids), reason
            )
        else:
            yield from run


def _dead(request: Request, failure: Failure) -> Completion:
    return refusal(request, Failure("engine_dead", failure.message))
