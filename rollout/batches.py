"""Accepted work, from accept to ack: what runs, what waits, what has ended and is owed."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable

from protocols.codec import fingerprint
from protocols.errors import Duplicate, Internal, UnknownTrajectory
from protocols.fields import Group, Record, Status, TrajectoryReason
from protocols.replies import Accepted, TurnDone
from protocols.requests import Cancel, Continue, SubmitBatch
from rollout.admission import Admission, echoed_bytes, largest_record, record_bytes
from rollout.observer import Observer
from rollout.pace import Lanes, Pace
from rollout.rollout import Rollout
from rollout.sessions import Session
from rollout.submitted import Batch, Member, SubmittedGroup
from rollout.trajectory import End, TrajectorySpec

log = logging.getLogger(__name__)


class Batches:
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
        max_context: int,
        observer: Observer,
    ) -> None:
        self.admission = admission
        self._launch = launch
        self._untouched = untouched
        self._version = version
        self._max_context = max_context
        self._observer = observer
        self._orders = itertools.count()
        self._starts = itertools.count()
        self._waiting: dict[Member, None] = {}
        self._tasks: dict[asyncio.Task[Record], Member] = {}
        self._to_end: Lanes[Member] = Lanes()
        self._starting = Pace(self._start_next)
        self._ending = Pace(self._end_next)
        self.idle = asyncio.Event()
        self.idle.set()
        self.ended: Counter[Status] = Counter()
        self.results = 0
        self.results_dropped = 0

    # Requests, in the order of a trajectory's life.

    def accept(self, session: Session, submit: SubmitBatch) -> Accepted:
        """All of it or nothing. Raises Duplicate or Overloaded. `admit` starts what may start."""
        step = self._version() if submit.step is None else submit.step
        batch = session.batches.get(submit.batch_id) or Batch(
            session, submit.batch_id, submit.id, time.monotonic(), step
        )
        known, new = [], []
        for i, spec in enumerate(submit.groups):
            asked: dict[str, object] = {"trajectory_ids": (), "sample_indices": None}
            if spec.messages is not None:
                asked["prompt"] = spec.prompt[:0]  # a template may print the date, and a repeat come after midnight
            content = fingerprint(spec.model_copy(update=asked))
            group = batch.groups.get(spec.id)
            if group is not None and group.content != content:
                raise Duplicate("a group of this id and other content is open", field=f"groups[{i}].id")
            group = group or self._group(batch, spec, content)
            indices = spec.sample_indices or range(len(spec.trajectory_ids))
            for j, (name, index) in enumerate(zip(spec.trajectory_ids, indices, strict=True)):
                member = session.trajectories.get(name)
                if member is None:
                    new.append(Member(name, group, index, next(self._orders), time.monotonic()))
                elif (member.group, member.sample_index) == (group, index):
                    known.append(member)
                else:
                    where = f"groups[{i}].trajectory_ids[{j}]"
                    raise Duplicate(f"trajectory {name!r} is open with other content", field=where)
        self.admission.check(len(new))
        batch.submit_id = submit.id
        for member in known:
            session.repeat(member.key)
        for member in new:
            self._add(member)
        if new:
            self._observer.batch_accepted(batch.round, len(new))
        return Accepted(id=submit.id, batch_id=batch.id, trajectories=len(known) + len(new), known=len(known))

    def admit(self) -> None:
        """Start what may start, soon: called after every change that can make room."""
        self._starting.wake()

    def answer(self, session: Session, message: Continue) -> bool:
        """False: the trajectory has ended meanwhile. Raises UnknownTrajectory, PrefixMismatch, BadRequest."""
        member = session.trajectories.get(message.trajectory_id)
        if member is None or not member.started:
            raise UnknownTrajectory(f"{message.trajectory_id!r} does not wait for an answer", field="trajectory_id")
        if member.rollout is None:
            return False
        member.rollout.answer(message)
        if member.rollout.pending_turn is None:
            session.outbox.drop(member.turn_key)
        return True

    def cancel(self, session: Session, message: Cancel) -> dict[str, int]:
        """End what still runs or waits; what that finds, counted."""
        found = Counter(cancelled=0, ended=0, unknown=0)
        for member in self._named(session, message, found):
            found["cancelled" if member.record is None else "ended"] += 1
            self._end_soon(member, "abort_client")
        return dict(found)

    def acknowledge(self, session: Session, names: Iterable[str]) -> None:
        """Forget results. Ids that are unknown or have not ended are ignored."""
        for name in names:
            member = session.trajectories.get(name)
            if member is not None and member.record is not None:
                session.settle(member.key)
                self._forget(member)
        self.admit()

    def expire(self, session: Session) -> int:
        """Nobody wants this session's work any more: end it. How many of its trajectories had not ended."""
        unfinished = 0
        for member in tuple(session.trajectories.values()):
            if member.record is None:
                unfinished += 1
                member.forgotten = True
                self._end_soon(member, "abort_client")
            else:
                self.results_dropped += 1
                self._forget(member)
        self.admit()
        return unfinished

    def end_waiting(self, reason: TrajectoryReason) -> None:
        for member in self._waiting:
            self._end_soon(member, reason)

    def end_running(self, reason: TrajectoryReason) -> None:
        for member in self._tasks.values():
            self._end_soon(member, reason)

    def leave_running(self) -> None:
        """Wait no longer for environments that were given up or close: their trajectories have all they will have."""
        for task in self._tasks:
            task.cancel()

    # What happens to a trajectory.

    def _group(self, batch: Batch, spec: Group, content: bytes) -> SubmittedGroup:
        seed = secrets.randbits(64) if spec.sampling.seed is None else spec.sampling.seed
        largest = largest_record(spec, self._max_context)
        return SubmittedGroup(batch, spec, content, seed, echoed_bytes(spec), largest, time.monotonic())

    def _add(self, member: Member) -> None:
        group, batch, session = member.group, member.batch, member.session
        session.trajectories[member.id] = member
        session.batches[batch.id] = batch
        batch.groups[group.spec.id] = group
        for count in (group.count, batch.count):
            count.open += 1
            count.owed += 1
        self._waiting[member] = group.waiting[member] = None
        self.admission.queue(member)
        self.idle.clear()
        self._watch(group)

    def _start_next(self) -> bool:
        member = self.admission.next(self._version())
        if member is None:
            return False
        self._leave_queue(member)
        member.rollout = self._launch(member.spec(next(self._starts)), functools.partial(self._turn, member))
        task = asyncio.get_running_loop().create_task(member.rollout.run())
        self._tasks[task] = member
        task.add_done_callback(self._ended)
        return True

    def _turn(self, member: Member, turn: TurnDone) -> None:
        if not member.forgotten:
            member.session.post(member.turn(turn))

    def _end_soon(self, member: Member, reason: TrajectoryReason) -> None:
        """The first reason stays. A great many may end at once: the loop has other work between them."""
        if member.record is not None or member.ending is not None:
            return
        member.ending = reason
        self._to_end.put(member.session, member)
        self._ending.wake()

    def _end_next(self) -> bool:
        member = self._to_end.take()
        if member is None:
            return False
        assert member.ending is not None
        if member.rollout is not None:
            member.rollout.cancel(member.ending)
        elif member in self._waiting:
            self._end_unstarted(member, member.ending)
        return True

    def _watch(self, group: SubmittedGroup) -> None:
        """See to it that samples do not wait beyond their deadline."""
        seconds = group.spec.budget.trajectory_deadline_s
        if seconds is not None and group.deadline is None and group.waiting:
            left = next(iter(group.waiting)).accepted + seconds - time.monotonic()
            group.deadline = asyncio.get_running_loop().call_later(max(0.0, left), self._overdue, group, seconds)

    def _overdue(self, group: SubmittedGroup, seconds: float) -> None:
        group.deadline = None
        latest = time.monotonic() - seconds
        for member in list(itertools.takewhile(lambda member: member.accepted <= latest, group.waiting)):
            del group.waiting[member]
            self._end_soon(member, "trajectory_deadline")
        self._watch(group)

    def _end_unstarted(self, member: Member, reason: TrajectoryReason) -> None:
        self._leave_queue(member)
        self.admission.start(member, 0)
        self._finish(member, self._untouched(member.spec(next(self._starts)), member.end(reason, self._version())))

    def _leave_queue(self, member: Member) -> None:
        del self._waiting[member]
        member.group.waiting.pop(member, None)
        member.started = True

    def _ended(self, task: asyncio.Task[Record]) -> None:
        member = self._tasks.pop(task)
        # A rollout makes a record of everything; if it cannot, its group must still end.
        if task.cancelled():
            end = End(member.ending or "abort_shutdown")
            record = self._untouched(member.spec(next(self._starts)), end)
        elif (error := task.exception()) is not None:
            log.error("trajectory %r broke", member.id, exc_info=error)
            broken = Internal(f"{type(error).__name__}: {error}", scope="trajectory")
            record = self._untouched(member.spec(next(self._starts)), End("error", failure=broken.failure()))
        else:
            record = task.result()
        self._finish(member, record)

    def _finish(self, member: Member, record: Record) -> None:
        group, batch, session = member.group, member.batch, member.session
        member.record, member.rollout = record, None
        self.ended[record.status] += 1
        self.admission.ended(member, record_bytes(record, group.echoed))
        for count in (group.count, batch.count):
            count.open -= 1
            count.ended[record.status] += 1
        self._observer.trajectory_ended(batch.round, record, self._version())
        if group.count.open == 0 and group.deadline is not None:
            group.deadline.cancel()
            group.deadline = None
        session.outbox.drop(member.turn_key)
        if member.forgotten:
            self._forget(member)
        else:
            self.results += 1
            session.post(member.done(record))
            if group.count.open == 0:
                session.post(group.done())
            if batch.count.open == 0:
                session.post(batch.done())
        if group.count.open == 0:
            self._observer.group_done(batch.round, group.spec.id, time.monotonic() - group.accepted)
        if batch.count.open == 0:
            self._observer.batch_done(batch.round)
        self.admit()
        if not self._tasks and not self._waiting:
            self.idle.set()

    def _forget(self, member: Member) -> None:
        """The result is acknowledged, or nobody wants it: its id and its room are free."""
        group, batch, session = member.group, member.batch, member.session
        self.admission.keep(member, 0)
        if not member.forgotten:
            self.results -= 1
        session.trajectories.pop(member.id, None)
        for count in (group.count, batch.count):
            count.owed -= 1
        if group.count.settled():
            session.outbox.sweep(group.key)
        if batch.count.settled():
            session.outbox.sweep(batch.key)
            session.batches.pop(batch.id, None)

    def _named(self, session: Session, message: Cancel, found: Counter[str]) -> list[Member]:
        """Members that a `cancel` names in any way, each once."""
        members: dict[Member, None] = {}
        for name in message.trajectory_ids:
            if (member := session.trajectories.get(name)) is not None:
                members[member] = None
            else:
                found["unknown"] += 1
        batches, groups = set(message.batch_ids), set(message.group_ids)
        for member in session.trajectories.values():
            if member.group.spec.id in groups or member.batch.id in batches:
                members[member] = None
        found["unknown"] += len(batches - session.batches.keys())
        found["unknown"] += len(groups - {name for batch in session.batches.values() for name in batch.groups})
        return list(members)
