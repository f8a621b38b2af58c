"""What a client submitted: a batch of groups of members, each member one trajectory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

from protocols.codec import fingerprint
from protocols.errors import StaleVersion
from protocols.fields import Group, Record, Status, TrajectoryReason, Truncation
from protocols.replies import BatchDone, GroupDone, TrajectoryDone, TurnDone
from protocols.requests import SubmitBatch
from rollout.environments.answer import End
from rollout.metrics.observer import Round
from rollout.trajectory.rollout import Rollout
from rollout.trajectory.spec import TrajectorySpec
from rollout.wire.outbox import Event, Key
from rollout.wire.sessions import Session

FINAL = ("engine_dead", "stale_version")
"""Failures that a further attempt would only repeat."""
INDEX_STRIDE = 2**20
"""A further attempt of a sample has the index of the one before and so much."""


@dataclass(slots=True, eq=False)
class Count:
    """Members of a group or batch. open: not ended. owed: not acknowledged."""

    open: int = 0
    owed: int = 0
    ended: Counter[Status] = field(default_factory=Counter)

    def settled(self) -> bool:
        return self.owed == 0


@dataclass(frozen=True, slots=True)
class Target:
    """When a batch has enough, and what becomes of the rest: see `SubmitBatch`."""

    groups_needed: int | None = None
    min_complete: int | None = None
    surplus: Literal["keep", "return"] = "keep"
    max_retries: int = 0

    @classmethod
    def of(cls, submit: SubmitBatch) -> Target:
        return cls(**{field.name: getattr(submit, field.name) for field in fields(cls)})

    @property
    def cuts(self) -> bool:
        """Then a trajectory may have to go on elsewhere: what is to be kept is returned where there is no room."""
        return self.groups_needed is not None or self.min_complete is not None

    def differs(self, other: Target) -> str | None:
        """The first field in which it does."""
        return next((f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)), None)


@dataclass(slots=True, eq=False)
class Batch:
    """submit_id: id of the newest submit that named this batch; its events carry it. step: the round it belongs to.

    complete: groups that have min_complete. kept: ids, in the order they were. cut, cut_tokens: see `BatchDone`.
    """

    session: Session
    id: str
    submit_id: str
    accepted: float
    step: int
    target: Target = Target()
    groups: dict[str, SubmittedGroup] = field(default_factory=dict)
    count: Count = field(default_factory=Count)
    complete: int = 0
    kept: dict[str, None] = field(default_factory=dict)
    cut: int = 0
    cut_tokens: int = 0
    round: Round = field(init=False)

    def __post_init__(self) -> None:
        self.round = Round(self.session.token, self.id, self.step, self.accepted)

    @property
    def key(self) -> Key:
        return "batch", self.id

    @property
    def satisfied(self) -> bool:
        needed = self.target.groups_needed
        return self.target.cuts and self.complete >= (len(self.groups) if needed is None else needed)

    def was_cut(self, record: Record) -> None:
        """record: what it had then."""
        self.cut += 1
        self.cut_tokens += sum(turn.length for segment in record.segments for turn in segment.turns)

    def done(self) -> Event:
        message = BatchDone(
            id=self.submit_id,
            batch_id=self.id,
            counts=dict(self.count.ended),
            wall_s=time.monotonic() - self.accepted,
            cut=self.cut,
            cut_tokens=self.cut_tokens,
            kept=tuple(self.kept),
        )
        return Event(self.key, lambda: message.model_copy(update={"id": self.submit_id}), settled=self.count.settled)


def content_of(spec: Group) -> bytes:
    """Fingerprint of everything but which samples are asked for, and the seed, which may be drawn."""
    law = spec.sampling.model_copy(update={"seed": None})
    same: dict[str, object] = {"trajectory_ids": (), "sample_indices": None, "counted": 0, "sampling": law}
    if spec.messages is not None:
        same["prompt"] = spec.prompt[:0]  # a template may print the date, and a repeat come after midnight
    return fingerprint(spec.model_copy(update=same))


@dataclass(slots=True, eq=False)
class SubmittedGroup:
    """seed: drawn if none came.

    echoed: bytes of it that every record repeats. largest: bytes of the largest record that a sample can become.
    waiting: samples that have not started, in the order of their accept; deadline: of the first of them.
    size: samples that were submitted; kept: of those, how many wait for a `resume`. complete: it has min_complete.
    """

    batch: Batch
    spec: Group
    seed: int
    echoed: int
    largest: int
    accepted: float
    count: Count = field(default_factory=Count)
    size: int = 0
    kept: int = 0
    complete: bool = False
    waiting: dict[Member, None] = field(default_factory=dict)
    deadline: asyncio.TimerHandle | None = None
    _content: bytes | None = None

    @property
    def key(self) -> Key:
        return "group", self.batch.id, self.spec.id

    @property
    def content(self) -> bytes:
        """`content_of` its spec. Most groups are submitted once, and nothing is ever compared with them."""
        if self._content is None:
            self._content = content_of(self.spec)
        return self._content

    @property
    def seconds(self) -> float | None:
        return self.spec.budget.trajectory_deadline_s

    @property
    def counted(self) -> int:
        """Samples that count towards min_complete."""
        return self.spec.counted + self.count.ended["completed"] + self.count.ended["truncated"]

    @property
    def needed(self) -> int:
        """How many of those make it complete."""
        return self.spec.needed(self.batch.target.min_complete, self.size)

    def ended(self, record: Record) -> bool:
        """One of its trajectories has ended. True: by that the group is complete."""
        for count in (self.count, self.batch.count):
            count.open -= 1
            count.ended[record.status] += 1
        if record.finish_reason == "abort_surplus":
            self.batch.was_cut(record)
        if self.complete or self.counted < self.needed:
            return False
        self.complete = True
        # What an earlier batch had enough of is left over, and no reason to end this one.
        self.batch.complete += self.spec.counted < self.needed
        return True

    def goes_on(self, member: Member, group: SubmittedGroup) -> None:
        """One that was kept is resumed in `group`, which may be this one."""
        self.kept -= 1
        self.size -= group is self
        self.batch.kept.pop(member.id, None)

    def done(self) -> Event:
        batch = self.batch
        message = GroupDone(
            id=batch.submit_id,
            batch_id=batch.id,
            group_id=self.spec.id,
            counts=dict(self.count.ended),
            complete=self.complete,
            short=not self.complete and self.counted + self.kept < self.needed,
            kept=self.kept,
        )
        return Event(self.key, lambda: message.model_copy(update={"id": batch.submit_id}), settled=self.count.settled)


@dataclass(slots=True, eq=False)
class Member:
    """One trajectory. asked_index: the sample index it was submitted with; sample_index: that of its present attempt.

    order: of its accept. reserved: bytes of result space it holds now; parked: those of a partial instead.
    started: it has left the queue. ending: it is to end for this reason. forgotten: nobody is left who wants it.
    kept_s: it is kept, so many seconds after its accept. before: the record that it goes on from.
    rollout: while it runs or is kept. record: from its end on.
    """

    id: str
    group: SubmittedGroup
    asked_index: int
    sample_index: int
    order: int
    accepted: float
    reserved: int = 0
    parked: int = 0
    started: bool = False
    ending: TrajectoryReason | None = None
    forgotten: bool = False
    kept_s: float | None = None
    retries: int = 0
    before: Record | None = None
    rollout: Rollout | None = None
    record: Record | None = None

    @property
    def batch(self) -> Batch:
        return self.group.batch

    @property
    def session(self) -> Session:
        return self.group.batch.session

    @property
    def key(self) -> Key:
        return "trajectory", self.id

    @property
    def turn_key(self) -> Key:
        return "turn", self.id

    def spec(self, start: int) -> TrajectorySpec:
        """start: its place among all trajectories that were started."""
        return TrajectorySpec(
            session=self.session.token,
            batch_id=self.batch.id,
            group=self.group.spec,
            trajectory_id=self.id,
            sample_index=self.sample_index,
            seed=self.group.seed,
            order=start,
            accepted=self.accepted,
            retries=self.retries,
            before=self.before,
            resumable=self.batch.target.cuts,
        )

    def end(self, reason: TrajectoryReason, version: int) -> End:
        """What it means that it ends for `reason` before it has started, while weights of `version` serve."""
        needed, seconds = self.group.spec.min_version, self.group.spec.budget.trajectory_deadline_s
        if reason != "trajectory_deadline" or seconds is None:
            return End(reason)
        if needed is not None and needed > version:
            stale = StaleVersion(f"version {needed} was waited for, {version} serves", scope="trajectory")
            return End("error", failure=stale.failure())
        return End(reason, Truncation(limit="trajectory_deadline_s", value=seconds))

    def next_attempt(self) -> None:
        """Start from nothing, with noise that no sample of its group has, whichever of them are in this batch."""
        self.retries += 1
        self.sample_index = (self.asked_index + self.retries * INDEX_STRIDE) % 2**32
        self.rollout = self.before = None

    def may_retry(self, record: Record) -> bool:
        """Its attempt ended so: is another one allowed, wanted and in time?"""
        failure = record.error
        if record.status != "failed" or failure is None or failure.code in FINAL:
            return False
        if self.retries >= self.batch.target.max_retries or self.ending is not None or self.forgotten:
            return False
        seconds = self.group.seconds
        return seconds is None or time.monotonic() < self.accepted + seconds

    def done(self, record: Record, instead: Callable[[Exception], Record]) -> Event:
        """instead: the record of one whose own cannot be sent."""

        def message(record: Record) -> TrajectoryDone:
            return TrajectoryDone.model_construct(id=self.batch.submit_id, record=record)

        return Event(self.key, lambda: message(record), instead=lambda error: message(instead(error)))

    def turn(self, turn: TurnDone) -> Event:
        return Event(self.turn_key, lambda: turn.model_copy(update={"id": self.batch.submit_id}))
