"""What a client submitted: a batch of groups of members, each member one trajectory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from protocols.errors import StaleVersion
from protocols.fields import Group, Record, Status, TrajectoryReason, Truncation
from protocols.replies import BatchDone, GroupDone, TrajectoryDone, TurnDone
from rollout.observer import Round
from rollout.outbox import Event, Key
from rollout.rollout import Rollout
from rollout.sessions import Session
from rollout.trajectory import End, TrajectorySpec


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
    """submit_id: id of the newest submit that named this batch; its events carry it. step: the round it belongs to."""

    session: Session
    id: str
    submit_id: str
    accepted: float
    step: int
    groups: dict[str, SubmittedGroup] = field(default_factory=dict)
    count: Count = field(default_factory=Count)

    @property
    def key(self) -> Key:
        return "batch", self.id

    @property
    def round(self) -> Round:
        return Round(self.session.token, self.id, self.step, self.accepted)

    def done(self) -> Event:
        counts, wall_s = dict(self.count.ended), time.monotonic() - self.accepted
        return Event(
            self.key,
            lambda: BatchDone(id=self.submit_id, batch_id=self.id, counts=counts, wall_s=wall_s),
            settled=self.count.settled,
        )


@dataclass(slots=True, eq=False)
class SubmittedGroup:
    """content: fingerprint of everything but which samples were asked for. seed: drawn if none came.

    echoed: bytes of it that every record repeats. largest: bytes of the largest record that a sample can become.
    waiting: samples that have not started, in the order of their accept; deadline: of the first of them.
    """

    batch: Batch
    spec: Group
    content: bytes
    seed: int
    echoed: int
    largest: int
    accepted: float
    count: Count = field(default_factory=Count)
    waiting: dict[Member, None] = field(default_factory=dict)
    deadline: asyncio.TimerHandle | None = None

    @property
    def key(self) -> Key:
        return "group", self.batch.id, self.spec.id

    def done(self) -> Event:
        batch, counts = self.batch, dict(self.count.ended)
        complete = not counts.keys() & {"aborted", "failed"}
        return Event(
            self.key,
            lambda: GroupDone(
                id=batch.submit_id, batch_id=batch.id, group_id=self.spec.id, counts=counts, complete=complete
            ),
            settled=self.count.settled,
        )


@dataclass(slots=True, eq=False)
class Member:
    """One trajectory. order: of its accept. reserved: bytes of result space it holds now.

    started: it has left the queue. ending: it is to end for this reason. forgotten: nobody is left who wants it.
    rollout: while it runs. record: from its end on.
    """

    id: str
    group: SubmittedGroup
    sample_index: int
    order: int
    accepted: float
    reserved: int = 0
    started: bool = False
    ending: TrajectoryReason | None = None
    forgotten: bool = False
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

    def done(self, record: Record) -> Event:
        return Event(self.key, lambda: TrajectoryDone(id=self.batch.submit_id, record=record))

    def turn(self, turn: TurnDone) -> Event:
        return Event(self.turn_key, lambda: turn.model_copy(update={"id": self.batch.submit_id}))
