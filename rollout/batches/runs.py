"""From the queue to the record: every accepted trajectory runs, waits, is kept or has ended, and is counted once."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable

from protocols.errors import Internal
from protocols.fields import Record, TrajectoryReason
from protocols.replies import TurnDone
from rollout.batches.admission import Admission
from rollout.batches.record_size import record_bytes
from rollout.batches.submitted import Batch, Member, SubmittedGroup
from rollout.batches.waiting import Waiting
from rollout.environments.answer import End
from rollout.generation.pace import Lanes, Pace
from rollout.metrics.observer import Observer
from rollout.trajectory.rollout import Rollout
from rollout.trajectory.spec import TrajectorySpec

log = logging.getLogger(__name__)


class Runs:
    """launch: makes the rollout of a trajectory; its second argument gets the turns that wait for an answer.

    untouched: the record of a trajectory that ends before it began. version: what serves now. idle: nothing runs
    or waits. results: ended and not acknowledged.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        launch: Callable[[TrajectorySpec, Callable[[TurnDone], None]], Rollout],
        untouched: Callable[[TrajectorySpec, End], Record],
        version: Callable[[], int],
        observer: Observer,
    ) -> None:
        self.admission = admission
        self.version = version
        self._launch = launch
        self._untouched = untouched
        self._observer = observer
        self._starts = itertools.count()
        self._waiting = Waiting(lambda member: self.end(member, "trajectory_deadline"))
        self._kept: dict[Member, None] = {}
        self._tasks: dict[asyncio.Task[Record], Member] = {}
        self._closings: set[asyncio.Task[None]] = set()
        self._to_end: Lanes[Member] = Lanes()
        self._starting = Pace(self._start_next)
        self._ending = Pace(self._end_next)
        self.idle = asyncio.Event()
        self.idle.set()
        self.results = 0

    def add(self, member: Member) -> None:
        """A new trajectory, or one that was kept, under the group it has now."""
        group, batch = member.group, member.batch
        for count in (group.count, batch.count):
            count.open += 1
            count.owed += 1
        group.size += 1
        if member.kept_s is not None:
            member.accepted, member.kept_s = time.monotonic() - member.kept_s, None
            del self._kept[member]
        self._queue(member)

    def told(self, batch: Batch, trajectories: int) -> None:
        """A submit has brought so many."""
        self._observer.batch_accepted(batch.round, trajectories)
        self._cut(batch)

    def admit(self) -> None:
        """Start what may start, soon: called after every change that can make room."""
        if self.admission.waiting:
            self._starting.wake()

    def end(self, member: Member, reason: TrajectoryReason) -> None:
        """The first reason stays, but what is surplus may be wanted by nobody at all. A great many may end at once: the
        loop has other work between them."""
        if member.record is None and member.ending in (None, "abort_surplus") and member.ending != reason:
            member.ending = reason
            self._to_end.put(member.session, member)
            self._ending.wake()

    def end_waiting(self, reason: TrajectoryReason) -> None:
        """And what is kept: nobody can come back for it."""
        for member in self._waiting:
            self.end(member, reason)
        for member in tuple(self._kept):
            member.forgotten = True
            self.end(member, reason)

    def end_running(self, reason: TrajectoryReason) -> None:
        for member in self._tasks.values():
            self.end(member, reason)

    def leave_running(self) -> None:
        """Wait no longer for environments that were given up or close: their trajectories have all they will have."""
        for task in (*self._tasks, *self._closings):
            task.cancel()

    def forget(self, member: Member) -> None:
        """The result is acknowledged, or nobody wants it: its id and its room are free."""
        self.admission.keep(member, 0)
        if not member.forgotten:
            self.results -= 1
        member.session.trajectories.pop(member.id, None)
        for count in (member.group.count, member.batch.count):
            count.owed -= 1
        self._settle(member.group)

    # The queue.

    def _queue(self, member: Member) -> None:
        self._waiting.add(member)
        self.admission.queue(member)
        self.idle.clear()

    def _start_next(self) -> bool:
        member = self.admission.next(self.version())
        if member is None:
            return False
        self._waiting.remove(member)
        if member.rollout is not None:
            if member.rollout.pending_turn is not None:
                member.session.post(member.turn(member.rollout.pending_turn))
            member.rollout.unpark()
            return True
        member.rollout = self._launch(member.spec(next(self._starts)), functools.partial(self._turn, member))
        task = asyncio.get_running_loop().create_task(member.rollout.run())
        self._tasks[task] = member
        task.add_done_callback(self._ended)
        return True

    def _turn(self, member: Member, turn: TurnDone) -> None:
        if not member.forgotten and member.kept_s is None:
            member.session.post(member.turn(turn))

    # Ends.

    def _end_next(self) -> bool:
        member = self._to_end.take()
        if member is None:
            return False
        reason = member.ending
        if reason is None or member.record is not None:
            return True
        if reason == "abort_surplus" and member.batch.target.surplus == "keep" and self._keep(member):
            return True
        if member in self._waiting:
            self._waiting.remove(member)
            self.admission.start(member, 0)
        elif member.kept_s is not None:
            self.admission.unpark(member)
        end = member.end(reason, self.version())
        if member.rollout is None:
            self._finish(member, self._record(member, end))
        else:
            member.rollout.cancel(reason, end.truncation)
        return True

    def _record(self, member: Member, end: End) -> Record:
        """Of one that did not get as far as to make its own."""
        return self._untouched(member.spec(next(self._starts)), end)

    def _unsent(self, member: Member, error: Exception) -> Record:
        """Its record cannot be sent. Counted as what it is, it comes as one that failed, and says why."""
        failure = Internal(f"its record cannot be sent: {type(error).__name__}: {error}", scope="trajectory").failure()
        return self._record(member, End("error", failure=failure))

    def _ended(self, task: asyncio.Task[Record]) -> None:
        member = self._tasks.pop(task)
        # A rollout makes a record of everything; if it cannot, its group must still end.
        if task.cancelled():
            record = self._record(member, End(member.ending or "abort_shutdown"))
        elif (error := task.exception()) is not None:
            log.error("trajectory %r broke", member.id, exc_info=error)
            broken = Internal(f"{type(error).__name__}: {error}", scope="trajectory")
            record = self._record(member, End("error", failure=broken.failure()))
        else:
            record = task.result()
        closing = None if member.rollout is None else member.rollout.closing
        if closing is not None and not closing.done():
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)
        if member.may_retry(record):
            self._retry(member, record)
        else:
            self._finish(member, record)

    def _retry(self, member: Member, record: Record) -> None:
        log.info("trajectory %r failed and starts again: %s", member.id, record.error and record.error.message)
        member.session.outbox.drop(member.turn_key)
        self.admission.ended(member, 0)
        member.next_attempt()
        self._queue(member)
        self.admit()

    def _finish(self, member: Member, record: Record) -> None:
        group, batch, session = member.group, member.batch, member.session
        was_kept = member in self._kept
        self._kept.pop(member, None)
        member.record, member.rollout, member.before = record, None, None
        self.admission.ended(member, record_bytes(record, group.echoed))
        session.outbox.drop(member.turn_key)
        if was_kept:
            # Counted when it was kept, and nobody waits for it.
            self.admission.keep(member, 0)
            session.trajectories.pop(member.id, None)
        else:
            enough = group.ended(record)
            self._observer.trajectory_ended(batch.round, record, self.version())
            if member.forgotten:
                self.forget(member)
            else:
                self.results += 1
                session.post(member.done(record, functools.partial(self._unsent, member)))
            self._closed(group, tell=not member.forgotten)
            if enough:
                self._cut(batch)
        self.admit()
        self._rest()

    def _closed(self, group: SubmittedGroup, *, tell: bool) -> None:
        """A trajectory of the group has left it; perhaps it was the last one, of the batch even."""
        batch = group.batch
        if group.count.open == 0:
            if tell:
                batch.session.post(group.done())
            self._observer.group_done(batch.round, group.spec.id, time.monotonic() - group.accepted)
        if batch.count.open == 0:
            if tell:
                batch.session.post(batch.done())
            self._observer.batch_done(batch.round)

    def _settle(self, group: SubmittedGroup) -> None:
        batch = group.batch
        if group.count.settled():
            batch.session.outbox.sweep(group.key)
        if batch.count.settled():
            batch.session.outbox.sweep(batch.key)
            batch.session.batches.pop(batch.id, None)
            batch.groups.clear()  # which name it in turn

    def _rest(self) -> None:
        if not self.admission.waiting and not self.admission.running:
            self.idle.set()

    # Surplus.

    def _cut(self, batch: Batch) -> None:
        """End, or keep, what has not ended of a batch that has enough."""
        if batch.count.open and batch.satisfied:
            for member in batch.session.trajectories.values():
                if member.batch is batch and member.kept_s is None:
                    self.end(member, "abort_surplus")

    def _keep(self, member: Member) -> bool:
        """Where there is room: else it is returned."""
        rollout = member.rollout
        if member in self._waiting:
            if not self.admission.keep_waiting(member, record_bytes(self._so_far(member), member.group.echoed)):
                return False
            self._waiting.remove(member)
            self._kept_now(member)
            return True
        if rollout is None or not self.admission.keep_soon(member):
            return False
        rollout.park(functools.partial(self._parked, member, rollout))
        return True

    def _parked(self, member: Member, rollout: Rollout) -> None:
        """It has come to rest, with all that was sampled. It may have been cancelled meanwhile."""
        reason = member.ending
        self.admission.park(member, record_bytes(rollout.so_far("abort_surplus"), member.group.echoed))
        self._kept_now(member)
        if reason is not None and reason != "abort_surplus":
            member.forgotten = True
            self.end(member, reason)

    def _kept_now(self, member: Member) -> None:
        group, batch = member.group, member.batch
        member.ending, member.kept_s = None, time.monotonic() - member.accepted
        self._kept[member] = None
        batch.session.outbox.drop(member.turn_key)
        for count in (group.count, batch.count):
            count.open -= 1
            count.owed -= 1
        group.kept += 1
        batch.kept[member.id] = None
        record = self._so_far(member)
        batch.was_cut(record)
        self._observer.trajectory_ended(batch.round, record, self.version())
        self._closed(group, tell=not member.forgotten)
        self._settle(group)
        self.admit()
        self._rest()

    def _so_far(self, member: Member) -> Record:
        if member.rollout is not None:
            return member.rollout.so_far("abort_surplus")
        return self._record(member, End("abort_surplus"))
