"""Requests about work, from submit to ack, each for one session."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable

from protocols.errors import BadRequest, Duplicate, UnknownTrajectory
from protocols.fields import Group, Limits, Record
from protocols.replies import Accepted
from protocols.requests import Cancel, Continue, SubmitBatch
from rollout.batches.record_size import echoed_bytes, largest_record
from rollout.batches.runs import Runs
from rollout.batches.submitted import Batch, Member, SubmittedGroup, Target, content_of
from rollout.trajectory.state import state_bytes
from rollout.wire.sessions import Session

log = logging.getLogger(__name__)


class Batches:
    """results_dropped: records that nobody came back for."""

    def __init__(self, runs: Runs, *, limits: Limits) -> None:
        self._runs = runs
        self._limits = limits
        self._orders = itertools.count()
        self.results_dropped = 0

    def accept(self, session: Session, submit: SubmitBatch) -> Accepted:
        """All of it or nothing. Raises Duplicate, UnknownTrajectory, BadRequest or Overloaded.

        `Runs.admit` starts what may start.
        """
        target = Target.of(submit)
        batch = session.batches.get(submit.batch_id) or self._batch(session, submit, target)
        if batch.target != target:
            raise Duplicate("a batch of this id is open that was to end otherwise", field=batch.target.differs(target))
        partials = {record.trajectory_id: record for record in submit.partials}
        now = time.monotonic()
        known: list[Member] = []
        new: list[Member] = []
        for i, spec in enumerate(submit.groups):
            self._group_members(batch, spec, i, now, partials, known, new)
        resumed = self._resumed(batch, submit, known, new)
        if target.groups_needed is not None:
            groups = {*batch.groups, *(spec.id for spec in submit.groups), *(group.spec.id for group, _ in resumed)}
            if target.groups_needed > len(groups):
                raise BadRequest(f"is more than the {len(groups)} groups there are", field="groups_needed")
        self._runs.admission.check(len(new) + len(resumed))
        batch.submit_id = submit.id
        for member in known:
            session.repeat(member.key)
        for member in new:
            self._add(member)
        for group, member in resumed:
            member.group.goes_on(member, group)
            member.group = group
            self._add(member)
        if new or resumed:
            self._runs.told(batch, len(new) + len(resumed))
        serving = self._runs.version()
        if late := [v for member in new if (v := member.group.spec.min_version) is not None and v > serving]:
            log.info("batch %r: %d wait for weights %d or later; %d serve", batch.id, len(late), min(late), serving)
        count = len(known) + len(new) + len(resumed)
        return Accepted(id=submit.id, batch_id=batch.id, trajectories=count, known=len(known))

    def _batch(self, session: Session, submit: SubmitBatch, target: Target) -> Batch:
        step = self._runs.version() if submit.step is None else submit.step
        return Batch(session, submit.batch_id, submit.id, time.monotonic(), step, target)

    def _group_members(
        self,
        batch: Batch,
        spec: Group,
        i: int,
        now: float,
        partials: dict[str, Record],
        known: list[Member],
        new: list[Member],
    ) -> None:
        """Sort the trajectories of one submitted group into those that are there already and new ones."""
        session = batch.session
        group = batch.groups.get(spec.id)
        if group is None:
            group = self._group(batch, spec, i, now)
        elif spec.sampling.seed not in (None, group.seed) or group.content != content_of(spec):
            raise Duplicate("a group of this id and other content is open", field=f"groups[{i}].id")
        indices = spec.sample_indices or range(len(spec.trajectory_ids))
        for j, (name, index) in enumerate(zip(spec.trajectory_ids, indices, strict=True)):
            member = session.trajectories.get(name)
            if member is None:
                before = partials.get(name)
                new.append(Member(name, group, index, index, next(self._orders), now, before=before))
            elif (member.group, member.asked_index) == (group, index):
                known.append(member)
            else:
                where = f"groups[{i}].trajectory_ids[{j}]"
                raise Duplicate(f"trajectory {name!r} is open with other content", field=where)

    def _resumed(
        self, batch: Batch, submit: SubmitBatch, known: list[Member], new: list[Member]
    ) -> list[tuple[SubmittedGroup, Member]]:
        """Kept trajectories that go on, with the groups that they have in this batch."""
        groups = batch.groups | {member.group.spec.id: member.group for member in new}
        resumed = []
        for i, name in enumerate(submit.resume):
            member = batch.session.trajectories.get(name)
            if member is not None and member.kept_s is None and member.batch is batch:
                known.append(member)
                continue
            if member is None or member.kept_s is None or member.ending is not None:
                raise UnknownTrajectory(f"{name!r} is not kept here: submit its group again", field=f"resume[{i}]")
            old = member.group
            group = groups.get(old.spec.id)
            if group is None:
                spec = old.spec.model_copy(update={"counted": old.counted})
                now = time.monotonic()
                group = SubmittedGroup(batch, spec, old.seed, old.echoed, old.largest, now)
                groups[old.spec.id] = group
            if group.seed != old.seed or group.content != old.content:
                raise Duplicate(f"its group {old.spec.id!r} is in this batch with other content", field=f"resume[{i}]")
            resumed.append((group, member))
        # Deadlines are watched in the order of the queue.
        return sorted(resumed, key=lambda pair: -(pair[1].kept_s or 0.0))

    def _group(self, batch: Batch, spec: Group, i: int, now: float) -> SubmittedGroup:
        """Raises BadRequest where a record of it could be larger than the limits."""
        seed = secrets.randbits(64) if spec.sampling.seed is None else spec.sampling.seed
        limits, echoed = self._limits, echoed_bytes(spec)
        largest = largest_record(spec, limits.max_context, echoed)
        if largest > min(limits.result_bytes, limits.max_message):
            raise _too_large(largest, limits, i)
        if batch.target.cuts:
            largest += state_bytes(spec, limits.max_context)
        return SubmittedGroup(batch, spec, seed, echoed, largest, now)

    def _add(self, member: Member) -> None:
        group, batch, session = member.group, member.batch, member.session
        session.trajectories[member.id] = member
        session.batches[batch.id] = batch
        batch.groups[group.spec.id] = group
        self._runs.add(member)

    def answer(self, session: Session, message: Continue) -> bool:
        """False: the trajectory has ended meanwhile. Raises UnknownTrajectory, PrefixMismatch, BadRequest."""
        member = session.trajectories.get(message.trajectory_id)
        if member is None or (member.rollout is None and member.record is None):
            raise UnknownTrajectory(f"{message.trajectory_id!r} does not wait for an answer", field="trajectory_id")
        if member.rollout is None:
            return False
        taken = member.rollout.answer(message)
        if member.rollout.pending_turn is None:
            session.outbox.drop(member.turn_key)
        return taken

    def cancel(self, session: Session, message: Cancel) -> dict[str, int]:
        """End what still runs or waits; what that finds, counted."""
        found = Counter(cancelled=0, ended=0, unknown=0)
        for member in self._named(session, message, found):
            found["cancelled" if member.record is None else "ended"] += 1
            member.forgotten |= member.kept_s is not None
            self._runs.end(member, "abort_client")
        return dict(found)

    def acknowledge(self, session: Session, names: Iterable[str]) -> None:
        """Forget results. Ids that are unknown or have not ended are ignored."""
        for name in names:
            member = session.trajectories.get(name)
            if member is not None and member.record is not None:
                session.settle(member.key)
                self._runs.forget(member)
        self._runs.admit()

    def expire(self, session: Session) -> int:
        """Nobody wants this session's work any more: end it. How many of its trajectories had not ended."""
        unfinished = 0
        for member in tuple(session.trajectories.values()):
            if member.record is None:
                unfinished += 1
                member.forgotten = True
                self._runs.end(member, "abort_client")
            else:
                self.results_dropped += 1
                self._runs.forget(member)
        session.outbox.clear()
        self._runs.admit()
        return unfinished

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


def _too_large(largest: int, limits: Limits, i: int) -> BadRequest:
    limit = "result_bytes" if largest > limits.result_bytes else "max_message"
    return BadRequest(
        f"the largest possible record, {largest} bytes, exceeds {limit}, {getattr(limits, limit)}: "
        "lower max_total_tokens or top_logprobs",
        field=f"groups[{i}].budget.max_total_tokens",
    )
