"""What this client has submitted and not yet been able to forget. Plain state, used by the I/O thread alone.

A trajectory is open until its record arrives, then received until it is acknowledged, then gone. Records come at
least once; `receive` says which of them is the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from protocols.errors import Duplicate, RolloutError
from protocols.fields import Group
from protocols.replies import TurnDone
from protocols.requests import Cancel, SubmitBatch
from rollout.client.trajectory import Trajectory
from rollout.client.waiting import Mailbox

Item: TypeAlias = Trajectory | TurnDone

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
class Kept:
    """One submitted batch.

    request_id: of the submit that its events name; retired: of those before a restart. unreadable: it was told that
    its events cannot be read. refusal: what the worker said when it was to start again.
    """

    message: SubmitBatch
    mailbox: Mailbox[Item]
    auto_ack: bool
    request_id: str
    retired: set[str] = field(default_factory=set)
    accepted: bool = False
    given_up: bool = False
    unreadable: bool = False
    refusal: RolloutError | None = None
    cancelled: set[str] = field(default_factory=set)
    trajectories: dict[str, Open] = field(default_factory=dict)

    @property
    def open_ids(self) -> list[str]:
        return [name for name, state in self.trajectories.items() if not state.received]


class Ledger:
    def __init__(self) -> None:
        self.batches: dict[str, Kept] = {}
        self._owner: dict[str, Kept] = {}
        self._acknowledged: OrderedDict[str, None] = OrderedDict()

    @property
    def open_count(self) -> int:
        return sum(len(kept.open_ids) for kept in self.batches.values() if not kept.given_up)

    def add(self, message: SubmitBatch, mailbox: Mailbox[Item], auto_ack: bool) -> Kept:
        """Raises Duplicate for ids that are still open, or being cancelled, in this client."""
        if message.batch_id in self.batches:
            raise Duplicate(f"batch {message.batch_id} is still open in this client", field="batch_id")
        kept = Kept(message, mailbox, auto_ack, message.id)
        for i, group in enumerate(message.groups):
            for name in group.trajectory_ids:
                if name in self._owner:
                    raise Duplicate(
                        f"trajectory {name} is still open in this client", field=f"groups[{i}].trajectory_ids"
                    )
                kept.trajectories[name] = Open(group.id)
        for name in kept.trajectories:
            self._owner[name] = kept
            self._acknowledged.pop(name, None)
        self.batches[message.batch_id] = kept
        return kept

    def forget(self, kept: Kept) -> None:
        """The worker never had it."""
        for name in kept.trajectories:
            del self._owner[name]
        self.batches.pop(kept.message.batch_id, None)

    def tell(self, error: RolloutError) -> None:
        """Whoever waits for a batch gets this error."""
        for kept in self.batches.values():
            kept.mailbox.set_error(error)

    def untell(self, error: RolloutError) -> None:
        for kept in self.batches.values():
            kept.mailbox.clear_error(error)

    def owner(self, trajectory_id: str) -> Kept | None:
        return self._owner.get(trajectory_id)

    def by_request(self, request_id: str) -> Kept | None:
        return next((kept for kept in self.batches.values() if kept.request_id == request_id), None)

    def cancelled(self, request: Cancel) -> None:
        """What the caller has cancelled is cancelled again if it must start again."""
        for batch_id, kept in self.batches.items():
            for name, state in kept.trajectories.items():
                if (
                    batch_id in request.batch_ids
                    or state.group_id in request.group_ids
                    or name in request.trajectory_ids
                ):
                    kept.cancelled.add(name)

    def receive(self, trajectory_id: str) -> Arrival:
        kept = self._owner.get(trajectory_id)
        if kept is None:
            return Arrival.UNWANTED if trajectory_id in self._acknowledged else Arrival.UNKNOWN
        state = kept.trajectories[trajectory_id]
        if state.received:
            return Arrival.REPEATED
        state.received = True
        if kept.given_up:
            self.acknowledge([trajectory_id])
            return Arrival.UNWANTED
        return Arrival.FIRST

    def is_news(self, event: TurnDone) -> bool:
        """Is this turn to be shown? Not when it comes again, nor from before a restart."""
        kept = self._owner.get(event.trajectory_id)
        if kept is None or kept.given_up or event.id in kept.retired:
            return False
        state = kept.trajectories[event.trajectory_id]
        if state.received or event.turn.index <= state.last_turn:
            return False
        state.last_turn = event.turn.index
        return True

    def is_stale(self, trajectory_id: str, request_id: str) -> bool:
        """Does a turn, named by the submit it belonged to, date from before a restart?"""
        kept = self._owner.get(trajectory_id)
        return kept is not None and request_id in kept.retired

    def acknowledge(self, trajectory_ids: Iterable[str]) -> list[str]:
        """Forget received trajectories; returns those that were still here."""
        gone = []
        for name in trajectory_ids:
            kept = self._owner.get(name)
            if kept is None or not kept.trajectories[name].received:
                continue
            del self._owner[name], kept.trajectories[name]
            if not kept.trajectories:
                del self.batches[kept.message.batch_id]
            self._acknowledged[name] = None
            gone.append(name)
        while len(self._acknowledged) > REMEMBERED:
            self._acknowledged.popitem(last=False)
        return gone

    def give_up(self, kept: Kept) -> tuple[list[str], list[str]]:
        """Nobody will take the batch's results any more. Returns ids to acknowledge and ids to cancel."""
        if kept.given_up:
            return [], []
        kept.given_up = True
        unseen = [item.trajectory_id for item in kept.mailbox.discard(lambda _: True) if isinstance(item, Trajectory)]
        seen = [name for name, state in kept.trajectories.items() if state.received and kept.auto_ack]
        to_cancel = kept.open_ids
        return self.acknowledge([*unseen, *seen]), to_cancel

    def start_again(self, new_id: str, kept: Kept) -> SubmitBatch | None:
        """The submit of what is still open of a batch, for a worker that knows nothing of it."""
        if kept.given_up:
            for name in kept.open_ids:
                kept.trajectories[name].received = True
                self.acknowledge([name])
            return None
        names = set(kept.open_ids)
        groups = [part for group in kept.message.groups if (part := _part(group, names)) is not None]
        if not groups:
            return None
        kept.retired.add(kept.request_id)
        kept.request_id = new_id
        for name in names:
            kept.trajectories[name].last_turn = -1
        kept.mailbox.discard(lambda item: isinstance(item, TurnDone))
        return kept.message.model_copy(update={"id": new_id, "groups": tuple(groups)})


def _part(group: Group, names: set[str]) -> Group | None:
    """The group with some of its trajectories, each with the noise key that it had."""
    indices = group.sample_indices or range(len(group.trajectory_ids))
    left = [(name, index) for name, index in zip(group.trajectory_ids, indices, strict=True) if name in names]
    if not left:
        return None
    return group.model_copy(
        update={"trajectory_ids": tuple(name for name, _ in left), "sample_indices": tuple(index for _, index in left)}
    )
