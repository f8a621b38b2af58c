"""Which accepted trajectories may start: room for their largest possible record is taken first.

Nothing accepted is ever dropped for lack of room: it waits, in order of priority and age. A result gives back what it
did not need when it ends, and the rest when the client has acknowledged it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from protocols.errors import Overloaded
from rollout.batches.record_size import longest
from rollout.generation.kv_budget import Candidate, KvBudget

if TYPE_CHECKING:
    from rollout.batches.submitted import Member

KEPT_PART = 4
"""Kept partials take so small a part of the result space, beside it."""
SLACK = 64
"""Entries of the queue that may be out of date, beyond as many as are not: each keeps a whole trajectory."""


class Admission:
    """result_bytes: records kept until acknowledged, running ones at their largest. at_once: trajectories running.

    max_waiting: accepted trajectories that have not started; more are refused. kv: who fits into the KV pool.
    """

    def __init__(
        self, *, result_bytes: int, at_once: int, max_waiting: int, max_context: int = 0, kv: KvBudget | None = None
    ) -> None:
        self._max_context = max_context
        self._kv = kv
        self._result_bytes = result_bytes
        self._at_once = at_once
        self._max_waiting = max_waiting
        self._ready: list[tuple[int, int, Member]] = []
        self._too_new: list[tuple[int, int, Member]] = []
        self.reserved_bytes = 0
        self.kept_bytes = 0
        self.kept = 0
        self.running = 0
        self.waiting = 0
        self.stalls = 0

    @property
    def waiting_for_weights(self) -> int:
        """Trajectories whose min_version has not come, at most: some may have left the queue."""
        return len(self._too_new)

    @property
    def wanted_version(self) -> int | None:
        """The lowest that they wait for."""
        return self._too_new[0][0] if self._too_new else None

    def check(self, count: int) -> None:
        """Raises Overloaded if `count` more cannot wait."""
        if self.waiting + count > self._max_waiting:
            raise Overloaded(
                f"{self.waiting} trajectories wait already and {count} more exceed {self._max_waiting}: "
                "submit again when results have come back"
            )

    def queue(self, member: Member) -> None:
        self.waiting += 1
        heapq.heappush(self._ready, (-member.group.spec.priority, member.order, member))

    def next(self, version: int) -> Member | None:
        """The next trajectory to start under weights of `version`, its room taken. None: it has to wait."""
        while self._too_new and self._too_new[0][0] <= version:
            member = heapq.heappop(self._too_new)[2]
            heapq.heappush(self._ready, (-member.group.spec.priority, member.order, member))
        while self._ready:
            member = self._ready[0][2]
            needed = member.group.spec.min_version
            if member.started or member.ending is not None:
                heapq.heappop(self._ready)
            elif needed is not None and needed > version:
                heapq.heappop(self._ready)
                heapq.heappush(self._too_new, (needed, member.order, member))
            elif self.running >= self._at_once:
                return None
            elif self.reserved_bytes + member.group.largest > self._result_bytes:
                self.stalls += 1
                return None
            elif not self._takes_kv(member):
                return None
            else:
                heapq.heappop(self._ready)
                self.start(member, member.group.largest)
                return member
        return None

    def start(self, member: Member, nbytes: int) -> None:
        """A waiting trajectory starts, out of turn perhaps, and takes `nbytes` of room."""
        self._leave_queue()
        self.running += 1
        self.keep(member, nbytes)
        self._leave_kept(member)

    def keep_soon(self, member: Member) -> bool:
        """A running trajectory is to be kept, beside the results. False: there is no room for another one."""
        largest = member.group.largest
        return self.kept < self._at_once and self._keep(member, largest)

    def keep_waiting(self, member: Member, nbytes: int) -> bool:
        """A waiting trajectory is to be kept instead, which takes `nbytes`. False: there is no room for another one."""
        if not member.parked and not self._keep(member, nbytes):
            return False
        self._leave_queue()
        return True

    def _keep(self, member: Member, nbytes: int) -> bool:
        if self.kept_bytes + nbytes > self._result_bytes // KEPT_PART:
            return False
        self.kept += 1
        self.kept_bytes += nbytes
        member.parked = nbytes
        return True

    def park(self, member: Member, nbytes: int) -> None:
        """It has come to rest, and occupies `nbytes` until it runs or ends."""
        self.running -= 1
        self.keep(member, 0)
        self.kept_bytes += nbytes - member.parked
        member.parked = nbytes
        self._leave_kv(member)

    def unpark(self, member: Member) -> None:
        """A kept trajectory ends."""
        self.running += 1
        self._leave_kept(member)

    def _leave_kept(self, member: Member) -> None:
        if member.parked:
            self.kept -= 1
            self.kept_bytes -= member.parked
            member.parked = 0

    def _leave_kv(self, member: Member) -> None:
        if self._kv is not None and (key := kv_key(member)) in self._kv:
            record = member.record
            self._kv.end(key, tells=record is not None and record.status in ("completed", "truncated"))

    def _takes_kv(self, member: Member) -> bool:
        """May it start as far as the KV pool is concerned? Then it does."""
        if self._kv is None:
            return True
        candidate = kv_candidate(member, self._max_context)
        if fits := self._kv.may_start(candidate):
            self._kv.start(candidate)
        return fits

    def _leave_queue(self) -> None:
        """One waits no longer. Those that left out of turn are let go of when they are as many as the others."""
        self.waiting -= 1
        if not self.waiting:
            self._ready.clear()
            self._too_new.clear()
        elif len(self._ready) + len(self._too_new) > 2 * self.waiting + SLACK:
            for heap in (self._ready, self._too_new):
                heap[:] = [entry for entry in heap if not entry[2].started]
                heapq.heapify(heap)

    def ended(self, member: Member, nbytes: int) -> None:
        """A started trajectory has its record, of `nbytes`."""
        self.running -= 1
        self.keep(member, nbytes)
        self._leave_kept(member)
        self._leave_kv(member)

    def keep(self, member: Member, nbytes: int) -> None:
        """From now on `member` occupies `nbytes`; 0 when its result is acknowledged or dropped."""
        self.reserved_bytes += nbytes - member.reserved
        member.reserved = nbytes


def kv_key(member: Member) -> str:
    """That of `Trajectory.key`."""
    return f"{member.session.token}/{member.id}"


def kv_candidate(member: Member, max_context: int) -> Candidate:
    """What is known of a trajectory before it starts."""
    group = member.group.spec
    return Candidate(
        key=kv_key(member),
        group=(member.session.token, member.batch.id, group.id),
        kind=(group.environment.name, len(group.environment.script)),
        prompt=len(group.prompt) if member.rollout is None else member.rollout.length,
        longest=longest(group, max_context),
    )
