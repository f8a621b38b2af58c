"""What clients submitted: batches of groups of trajectories, each from its accept to its ack."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from protocols.codec import fingerprint
from protocols.errors import Duplicate, Internal, StaleVersion, UnknownTrajectory
from protocols.fields import Failure, Group, Record, Status, TrajectoryReason
from protocols.replies import Accepted, BatchDone, GroupDone, TrajectoryDone, TurnDone
from protocols.requests import Cancel, Continue, SubmitBatch
from rollout.admission import Admission, largest_record, record_bytes
from rollout.outbox import Event
from rollout.rollout import Rollout
from rollout.sessions import Session
from rollout.trajectory import TrajectorySpec

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Count:
    """Members of a group or batch. open: not ended. owed: not acknowledged."""

    open: int = 0
    owed: int = 0
    ended: Counter[Status] = field(default_factory=Counter)

    def settled(self) -> bool:
        return self.owed == 0


@dataclass(slots=True, eq=False)
class Batch:
    """submit_id: id of the newest submit that named this batch; its events carry it."""

    session: Session
    id: str
    submit_id: str
    accepted: float
    groups: dict[str, Submitted] = field(default_factory=dict)
    count: Count = field(default_factory=Count)


@dataclass(slots=True, eq=False)
class Submitted:
    """A group. content: fingerprint of everything but which samples were asked for. seed: drawn if none came.

    largest: bytes of the largest record a sample can become. deadline: ends those that have not started by then.
    """

    batch: Batch
    spec: Group
    content: bytes
    seed: int
    largest: int
    count: Count = field(default_factory=Count)
    deadline: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Member:
    """One trajectory. reserved: bytes of result space it holds now. forgotten: nobody is left who wants it."""

    id: str
    group: Submitted
    sample_index: int
    order: int
    accepted: float
    reserved: int = 0
    started: bool = False
    forgotten: bool = False
    rollout: Rollout | None = None
    record: Record | None = None

    @property
    def session(self) -> Session:
        return self.group.batch.session


class Batches:
    """launch: makes the rollout of a trajectory; its second argument gets the turns that wait for an answer.

    untouched: the record of a trajectory that failed before it began. version: what serves now. idle: nothing runs
    or waits. acknowledged: no result is kept for anybody.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        launch: Callable[[TrajectorySpec, Callable[[TurnDone], None]], Rollout],
        untouched: Callable[[TrajectorySpec, Failure], Record],
        version: Callable[[], int],
        max_context: int,
    ) -> None:
        self.admission = admission
        self._launch = launch
        self._untouched = untouched
        self._version = version
        self._max_context = max_context
        self._order = itertools.count()
        self._starts = itertools.count()
        self._tasks: dict[asyncio.Task[Record], Member] = {}
        self._waiting: dict[Member, None] = {}
        self.idle = asyncio.Event()
        self.acknowledged = asyncio.Event()
        self.idle.set()
        self.acknowledged.set()
        self.ended: Counter[Status] = Counter()
        self.results = 0
        self.results_dropped = 0

    # Requests, in the order of a trajectory's life.

    def accept(self, session: Session, submit: SubmitBatch) -> Accepted:
        """All of it or nothing. Raises Duplicate or Overloaded. `admit` starts what may start."""
        batch = session.batches.get(submit.batch_id) or Batch(session, submit.batch_id, submit.id, time.monotonic())
        known, new = [], []
        for i, spec in enumerate(submit.groups):
            content = fingerprint(spec.model_copy(update={"trajectory_ids": (), "sample_indices": None}))
            group = batch.groups.get(spec.id)
            if group is not None and group.content != content:
                raise Duplicate("a group of this id and other content is open", field=f"groups[{i}].id")
            group = group or self._group(batch, spec, content)
            indices = spec.sample_indices or range(len(spec.trajectory_ids))
            for j, (name, index) in enumerate(zip(spec.trajectory_ids, indices, strict=True)):
                member = session.trajectories.get(name)
                if member is None:
                    new.append(Member(name, group, index, next(self._order), time.monotonic()))
                elif (member.group, member.sample_index) == (group, index):
                    known.append(member)
                else:
                    where = f"groups[{i}].trajectory_ids[{j}]"
                    raise Duplicate(f"trajectory {name!r} is open with other content", field=where)
        self.admission.check(len(new))
        batch.submit_id = submit.id
        for member in known:
            session.repeat(("trajectory", member.id))
        for member in new:
            self._add(member)
        return Accepted(id=submit.id, batch_id=batch.id, trajectories=len(known) + len(new), known=len(known))

    def admit(self) -> None:
        """Start what may start: called after every change that can make room."""
        while (member := self.admission.next(self._version())) is not None:
            self._start(member)

    def answer(self, session: Session, message: Continue) -> bool:
        """False: the trajectory has ended meanwhile. Raises UnknownTrajectory, PrefixMismatch, BadRequest."""
        member = session.trajectories.get(message.trajectory_id)
        if member is None or not member.started:
            raise UnknownTrajectory(f"{message.trajectory_id!r} does not wait for an answer", field="trajectory_id")
        if member.rollout is None:
            return False
        member.rollout.answer(message)
        if member.rollout.pending_turn is None:
            session.outbox.drop(("turn", member.id))
        return True

    def cancel(self, session: Session, message: Cancel) -> dict[str, int]:
        """End what still runs or waits; what that finds, counted."""
        found = Counter(cancelled=0, ended=0, unknown=0)
        for member in self._named(session, message, found):
            if member.record is None:
                found["cancelled"] += 1
                self._end(member, "abort_client")
            else:
                found["ended"] += 1
        return dict(found)

    def acknowledge(self, session: Session, names: Iterable[str]) -> None:
        """Forget results. Ids that are unknown or have not ended are ignored."""
        for name in names:
            member = session.trajectories.get(name)
            if member is not None and member.record is not None:
                session.settle(("trajectory", name))
                self._forget(member)
        self.admit()

    def expire(self, session: Session) -> int:
        """Nobody wants this session's work any more: end it. How many of its trajectories had not ended."""
        unfinished = 0
        for member in tuple(session.trajectories.values()):
            if member.record is not None:
                self.results_dropped += 1
                self._forget(member)
                continue
            unfinished += 1
            member.forgotten = True
            self._end(member, "abort_client")
        self.admit()
        return unfinished

    def end_all(self, reason: TrajectoryReason, *, waiting_only: bool = False) -> None:
        members = [*self._waiting] + ([] if waiting_only else [*self._tasks.values()])
        for member in members:
            self._end(member, reason)

    # What happens to a trajectory.

    def _group(self, batch: Batch, spec: Group, content: bytes) -> Submitted:
        seed = secrets.randbits(64) if spec.sampling.seed is None else spec.sampling.seed
        return Submitted(batch, spec, content, seed, largest_record(spec, self._max_context))

    def _add(self, member: Member) -> None:
        group, batch, session = member.group, member.group.batch, member.session
        session.trajectories[member.id] = member
        session.batches[batch.id] = batch
        batch.groups[group.spec.id] = group
        for count in (group.count, batch.count):
            count.open += 1
            count.owed += 1
        self._waiting[member] = None
        self.admission.queue(member)
        self.idle.clear()
        if group.deadline is None and (seconds := group.spec.budget.trajectory_deadline_s) is not None:
            group.deadline = asyncio.get_running_loop().call_later(seconds, self._overdue, group)

    def _overdue(self, group: Submitted) -> None:
        """The deadline of samples that still wait: they end now, with what that means."""
        group.deadline = None
        needed, version = group.spec.min_version, self._version()
        for member in [member for member in self._waiting if member.group is group]:
            self.admission.start(member, 0)
            if needed is None or needed <= version:
                self._start(member)
                continue
            del self._waiting[member]
            member.started = True
            failure = StaleVersion(f"version {needed} was waited for, {version} serves", scope="trajectory").failure()
            self._finish(member, self._untouched(self._spec(member), failure))

    def _spec(self, member: Member) -> TrajectorySpec:
        group = member.group
        return TrajectorySpec(
            session=member.session.token,
            batch_id=group.batch.id,
            group=group.spec,
            trajectory_id=member.id,
            sample_index=member.sample_index,
            seed=group.seed,
            order=next(self._starts),
            accepted=member.accepted,
        )

    def _start(self, member: Member, reason: TrajectoryReason | None = None) -> None:
        """Run it; with a reason, only to its record."""
        del self._waiting[member]
        member.started = True
        member.rollout = self._launch(self._spec(member), functools.partial(self._turn, member))
        if reason is not None:
            member.rollout.cancel(reason)
        task = asyncio.get_running_loop().create_task(member.rollout.run())
        self._tasks[task] = member
        task.add_done_callback(self._ended)

    def _end(self, member: Member, reason: TrajectoryReason) -> None:
        if member.rollout is not None:
            member.rollout.cancel(reason)
        else:
            self.admission.start(member, 0)
            self._start(member, reason)

    def _turn(self, member: Member, turn: TurnDone) -> None:
        if not member.forgotten:
            batch = member.group.batch
            member.session.post(Event(("turn", member.id), lambda: turn.model_copy(update={"id": batch.submit_id})))

    def _ended(self, task: asyncio.Task[Record]) -> None:
        member = self._tasks.pop(task)
        try:
            record = task.result()
        except BaseException as error:
            # A rollout makes a record of everything; if it cannot, its group must still end.
            log.exception("trajectory %r broke", member.id)
            failure = Internal(f"{type(error).__name__}: {error}", scope="trajectory").failure()
            record = self._untouched(self._spec(member), failure)
        self._finish(member, record)

    def _finish(self, member: Member, record: Record) -> None:
        group, batch, session = member.group, member.group.batch, member.session
        member.record, member.rollout = record, None
        self.ended[record.status] += 1
        self.admission.ended(member, record_bytes(record))
        for count in (group.count, batch.count):
            count.open -= 1
            count.ended[record.status] += 1
        if group.count.open == 0 and group.deadline is not None:
            group.deadline.cancel()
            group.deadline = None
        session.outbox.drop(("turn", member.id))
        if member.forgotten:
            self._forget(member)
        else:
            self.results += 1
            self.acknowledged.clear()
            session.post(Event(("trajectory", member.id), lambda: TrajectoryDone(id=batch.submit_id, record=record)))
            if group.count.open == 0:
                session.post(_group_done(group))
            if batch.count.open == 0:
                session.post(_batch_done(batch))
        self.admit()
        if not self._tasks and not self._waiting:
            self.idle.set()

    def _forget(self, member: Member) -> None:
        """The result is acknowledged, or nobody wants it: its id and its room are free."""
        group, batch, session = member.group, member.group.batch, member.session
        self.admission.keep(member, 0)
        if not member.forgotten:
            self.results -= 1
            if self.results == 0:
                self.acknowledged.set()
        session.trajectories.pop(member.id, None)
        for count in (group.count, batch.count):
            count.owed -= 1
        if group.count.settled():
            session.outbox.sweep(("group", batch.id, group.spec.id))
        if batch.count.settled():
            session.outbox.sweep(("batch", batch.id))
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
            if member.group.spec.id in groups or member.group.batch.id in batches:
                members[member] = None
        found["unknown"] += len(batches - session.batches.keys())
        found["unknown"] += len(groups - {name for batch in session.batches.values() for name in batch.groups})
        return list(members)


def _group_done(group: Submitted) -> Event:
    batch, counts = group.batch, dict(group.count.ended)
    complete = not counts.keys() & {"aborted", "failed"}
    return Event(
        ("group", batch.id, group.spec.id),
        lambda: GroupDone(
            id=batch.submit_id, batch_id=batch.id, group_id=group.spec.id, counts=counts, complete=complete
        ),
        settled=group.count.settled,
    )


def _batch_done(batch: Batch) -> Event:
    counts, wall_s = dict(batch.count.ended), time.monotonic() - batch.accepted
    return Event(
        ("batch", batch.id),
        lambda: BatchDone(id=batch.submit_id, batch_id=batch.id, counts=counts, wall_s=wall_s),
        settled=batch.count.settled,
    )
