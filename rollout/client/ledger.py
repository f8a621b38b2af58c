"""What this client has submitted and not yet been able to forget. Plain state, used by the I/O thread alone.

A trajectory is open until its record arrives, then received until it is acknowledged, then gone. Records come at
least once; `receive` says which of them is the first.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from protocols.errors import Duplicate, RolloutError
from protocols.fields import Group, Record
from protocols.replies import BatchDone, TurnDone
from protocols.requests import Cancel, SubmitBatch
from rollout.client.resumption import merged
from rollout.client.trajectory import Trajectory
from rollout.client.waiting import Mailbox

Item: TypeAlias = Trajectory | TurnDone

NO_VERSION = -(2**63)
"""No version is lower."""

REMEMBERED = 65536
"""Acknowledged ids kept in case the acknowledgement got lost with its connection and the record comes again."""


class Arrival(Enum):
    FIRST = "first"
    REPEATED = "repeated"
    UNWANTED = "unwanted"
    """Acknowledged or given up before: the worker may forget it."""
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Open:
    group_id: str
    received: bool = False
    last_turn: int = -1


@dataclass(slots=True, eq=False)
class Submitted:
    """One submitted batch.

    groups: the message's and those of the trajectories that it resumes, by id. counted: samples of them that have
    come and count towards min_complete.
    request_id: of the submit that its events name; retired: of those before a restart. unreadable: it was told that
    its events cannot be read. refusal: what the worker said when it was to start again. since: when it was submitted,
    by the monotonic clock. late: it has been said that it waits for weights. newest: the highest version asked for.
    """

    message: SubmitBatch
    mailbox: Mailbox[Item]
    auto_ack: bool
    request_id: str
    groups: dict[str, Group]
    counted: Counter[str] = field(default_factory=Counter)
    retired: set[str] = field(default_factory=set)
    accepted: bool = False
    given_up: bool = False
    unreadable: bool = False
    refusal: RolloutError | None = None
    since: float = field(default_factory=time.monotonic)
    late: bool = False
    newest: int = NO_VERSION
    cancelled: set[str] = field(default_factory=set)
    trajectories: dict[str, Open] = field(default_factory=dict)

    @property
    def open_ids(self) -> list[str]:
        return [name for name, state in self.trajectories.items() if not state.received]

    def parts(self, names: set[str]) -> tuple[Group, ...]:
        """The groups with these of their trajectories, and what had been counted of them."""
        parts = ((group, _part(group, names)) for group in self.groups.values())
        return tuple(
            part.model_copy(update={"counted": group.counted + self.counted[group.id]})
            for group, part in parts
            if part is not None
        )

    def still_needed(self, left: int) -> dict[str, int | None]:
        """groups_needed and min_complete of the submit of `left` groups that are still open."""
        message = self.message
        if message.groups_needed is None and message.min_complete is None:
            return {}
        needed = len(self.groups) if message.groups_needed is None else message.groups_needed
        needed -= sum(self._is_complete(group) for group in self.groups.values())
        # What can no longer be reached ends nothing early.
        return {"groups_needed": max(0, needed)} if needed <= left else {"groups_needed": None, "min_complete": None}

    def _is_complete(self, group: Group) -> bool:
        needed = group.needed(self.message.min_complete, len(group.trajectory_ids))
        return group.counted < needed <= group.counted + self.counted[group.id]


class Ledger:
    def __init__(self) -> None:
        self.batches: dict[str, Submitted] = {}
        self._owner: dict[str, Submitted] = {}
        self._acknowledged: OrderedDict[str, None] = OrderedDict()

    @property
    def open_count(self) -> int:
        return sum(len(batch.open_ids) for batch in self.batches.values() if not batch.given_up)

    def add(
        self, message: SubmitBatch, mailbox: Mailbox[Item], auto_ack: bool, resumed: tuple[Group, ...] = ()
    ) -> Submitted:
        """Raises Duplicate for ids that are still open, or being cancelled, in this client."""
        if message.batch_id in self.batches:
            raise Duplicate(f"batch {message.batch_id} is still open in this client", field="batch_id")
        groups = (*message.groups, *resumed)
        batch = Submitted(message, mailbox, auto_ack, message.id, {group.id: group for group in merged(groups)})
        batch.newest = max((g.min_version for g in groups if g.min_version is not None), default=NO_VERSION)
        for i, group in enumerate(groups):
            where = f"groups[{i}]" if i < len(message.groups) else f"resume[{i - len(message.groups)}]"
            for name in group.trajectory_ids:
                if name in self._owner:
                    raise Duplicate(f"trajectory {name} is still open in this client", field=f"{where}.trajectory_ids")
                batch.trajectories[name] = Open(group.id)
        for name in batch.trajectories:
            self._owner[name] = batch
            self._acknowledged.pop(name, None)
        self.batches[message.batch_id] = batch
        return batch

    def forget(self, batch: Submitted) -> None:
        """The worker never had it."""
        for name in batch.trajectories:
            del self._owner[name]
        self.batches.pop(batch.message.batch_id, None)

    def tell(self, error: RolloutError) -> None:
        """Whoever waits for a batch gets this error."""
        for batch in self.batches.values():
            batch.mailbox.set_error(error)

    def untell(self, error: RolloutError) -> None:
        for batch in self.batches.values():
            batch.mailbox.clear_error(error)

    def late(self, serving: int, seconds: float) -> list[str]:
        """What to say, once a batch, of those that have waited so long for other weights than these."""
        found = []
        for batch_id, batch in self.batches.items():
            # Most batches ask for what serves: their groups, thousands perhaps, are not looked through.
            if batch.newest <= serving or batch.late or batch.given_up or time.monotonic() < batch.since + seconds:
                continue
            if wait := weights_wait(batch.groups.values(), len(batch.open_ids), serving):
                batch.late = True
                found.append(f"batch {batch_id}: {wait}")
        return found

    def owner(self, trajectory_id: str) -> Submitted | None:
        return self._owner.get(trajectory_id)

    def by_request(self, request_id: str) -> Submitted | None:
        return next((batch for batch in self.batches.values() if batch.request_id == request_id), None)

    def cancelled(self, request: Cancel) -> None:
        """What the caller has cancelled is cancelled again if it must start again."""
        for batch_id, batch in self.batches.items():
            for name, state in batch.trajectories.items():
                if (
                    batch_id in request.batch_ids
                    or state.group_id in request.group_ids
                    or name in request.trajectory_ids
                ):
                    batch.cancelled.add(name)

    def receive(self, trajectory_id: str) -> Arrival:
        batch = self._owner.get(trajectory_id)
        if batch is None:
            return Arrival.UNWANTED if trajectory_id in self._acknowledged else Arrival.UNKNOWN
        state = batch.trajectories[trajectory_id]
        if state.received:
            return Arrival.REPEATED
        state.received = True
        if batch.given_up:
            self.acknowledge([trajectory_id])
            return Arrival.UNWANTED
        return Arrival.FIRST

    def count(self, record: Record) -> Group | None:
        """A record has come for the first time; the group it is of."""
        batch = self._owner[record.trajectory_id]
        batch.counted[record.group_id] += record.status in ("completed", "truncated")
        return batch.groups.get(record.group_id)

    def keep(self, done: BatchDone) -> Mailbox[Item] | None:
        """The batch has ended: what the worker has kept of it will not come. The mailbox to wake."""
        batch = self.batches.get(done.batch_id)
        if batch is None:
            return None
        names = {name for name in done.kept if name in batch.trajectories and not batch.trajectories[name].received}
        for name in names:
            del self._owner[name], batch.trajectories[name]
        batch.mailbox.withdraw(batch.parts(names), len(names))
        if not batch.trajectories:
            del self.batches[done.batch_id]
        return batch.mailbox

    def is_news(self, event: TurnDone) -> bool:
        """Is this turn to be shown? Not when it comes again, nor from before a restart."""
        batch = self._owner.get(event.trajectory_id)
        if batch is None or batch.given_up or event.id in batch.retired:
            return False
        state = batch.trajectories[event.trajectory_id]
        if state.received or event.turn.index <= state.last_turn:
            return False
        state.last_turn = event.turn.index
        return True

    def is_stale(self, trajectory_id: str, request_id: str) -> bool:
        """Does a turn, named by the submit it belonged to, date from before a restart?"""
        batch = self._owner.get(trajectory_id)
        return batch is not None and request_id in batch.retired

    def acknowledge(self, trajectory_ids: Iterable[str]) -> list[str]:
        """Forget received trajectories; returns those that were still here."""
        gone = []
        for name in trajectory_ids:
            batch = self._owner.get(name)
            if batch is None or not batch.trajectories[name].received:
                continue
            del self._owner[name], batch.trajectories[name]
            if not batch.trajectories:
                del self.batches[batch.message.batch_id]
            self._acknowledged[name] = None
            gone.append(name)
        while len(self._acknowledged) > REMEMBERED:
            self._acknowledged.popitem(last=False)
        return gone

    def give_up(self, batch: Submitted) -> tuple[list[str], list[str]]:
        """Nobody will take the batch's results any more. Returns ids to acknowledge and ids to cancel."""
        if batch.given_up:
            return [], []
        batch.given_up = True
        unseen = [item.trajectory_id for item in batch.mailbox.discard(lambda _: True) if isinstance(item, Trajectory)]
        seen = [name for name, state in batch.trajectories.items() if state.received and batch.auto_ack]
        to_cancel = batch.open_ids
        return self.acknowledge([*unseen, *seen]), to_cancel

    def start_again(self, new_id: str, batch: Submitted) -> SubmitBatch | None:
        """The submit of what is still open of a batch, for a worker that knows nothing of it."""
        if batch.given_up:
            for name in batch.open_ids:
                batch.trajectories[name].received = True
                self.acknowledge([name])
            return None
        names = set(batch.open_ids)
        if not (groups := batch.parts(names)):
            return None
        batch.retired.add(batch.request_id)
        batch.request_id = new_id
        for name in names:
            batch.trajectories[name].last_turn = -1
        batch.mailbox.discard(lambda item: isinstance(item, TurnDone))
        partials = tuple(record for record in batch.message.partials if record.trajectory_id in names)
        again = {"id": new_id, "groups": groups, "resume": (), "partials": partials}
        return batch.message.model_copy(update=again | batch.still_needed(len(groups)))


def weights_wait(groups: Iterable[Group], left: int, serving: int) -> str:
    """Which of the `left` trajectories of these groups cannot start under the weights that serve; "" if none."""
    wanted = [group for group in groups if group.min_version is not None and group.min_version > serving]
    count = min(left, sum(len(group.trajectory_ids) for group in wanted))
    lowest = min((group.min_version or 0 for group in wanted), default=0)
    return f"{count} wait for weights of version {lowest}, the worker serves {serving}" if count else ""


def _part(group: Group, names: set[str]) -> Group | None:
    """The group with some of its trajectories, each with the noise key that it had."""
    indices = group.sample_indices or range(len(group.trajectory_ids))
    left = [(name, index) for name, index in zip(group.trajectory_ids, indices, strict=True) if name in names]
    if not left:
        return None
    return group.model_copy(
        update={"trajectory_ids": tuple(name for name, _ in left), "sample_indices": tuple(index for _, index in left)}
    )
