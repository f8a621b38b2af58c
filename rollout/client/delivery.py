"""Events to the batches that wait for them, and acknowledgements back to the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from protocols.errors import BadRequest, Internal
from protocols.fields import Record
from protocols.replies import BatchDone, Reply, TrajectoryDone, TurnDone
from protocols.requests import Ack, Cancel, RequestMessage
from rollout.client.errors import ClientClosed
from rollout.client.ledger import Arrival, Item, Ledger
from rollout.client.trajectory import Trajectory
from rollout.client.waiting import Mailbox

log = logging.getLogger(__name__)

STRIKES = 3
"""A connection is made anew after an event that cannot be read, for the worker sends it again; so many times."""

MANY = 4096
"""Ids in one message, far below any worker's limits."""


class Delivery:
    """ack: what a `Trajectory` calls, on any thread. send: to the connection, if there is one."""

    def __init__(self, ledger: Ledger, *, ack: Callable[[str], None], new_id: Callable[[], str]) -> None:
        self._ledger = ledger
        self._ack = ack
        self._new_id = new_id
        self._to_acknowledge: list[str] = []
        self._to_cancel: list[str] = []
        self._reported_bytes = 0
        self._strikes = 0
        self._filled: set[Mailbox[Item]] = set()

    def event(self, message: Reply) -> None:
        if isinstance(message, TrajectoryDone):
            self._record(message.record)
        elif isinstance(message, BatchDone):
            if message.kept and (mailbox := self._ledger.keep(message)) is not None:
                self._filled.add(mailbox)
        elif isinstance(message, TurnDone) and self._ledger.is_news(message):
            batch = self._ledger.owner(message.trajectory_id)
            assert batch is not None
            self._put(batch.mailbox, message, ends_trajectory=False)

    def _record(self, record: Record) -> None:
        name = record.trajectory_id
        batch = self._ledger.owner(name)
        arrival = self._ledger.receive(name)
        if arrival is Arrival.UNWANTED:
            self._to_acknowledge.append(name)
        if arrival is not Arrival.FIRST:
            return
        assert batch is not None
        self._strikes = 0
        trajectory = Trajectory(record, self._ack, self._ledger.count(record))
        self._put(batch.mailbox, trajectory, ends_trajectory=True)

    def _put(self, mailbox: Mailbox[Item], item: Item, *, ends_trajectory: bool) -> None:
        mailbox.put(item, ends_trajectory=ends_trajectory)
        self._filled.add(mailbox)

    def wake(self) -> None:
        """Let whoever waits see what has been put since the last time."""
        for mailbox in self._filled:
            mailbox.wake()
        self._filled.clear()

    def unreadable(self, error: BadRequest) -> bool:
        """An event that could not be read. False: a new connection is to bring it again. The third time in a row
        its batch (all batches, when it is not known which) is told instead of waiting for ever."""
        batch = self._ledger.by_request(error.request_id)
        if batch is not None and batch.unreadable:
            return True
        self._strikes += 1
        log.warning("an event from the worker cannot be read: %s", error)
        if self._strikes < STRIKES:
            return False
        for told in [batch] if batch is not None else self._ledger.batches.values():
            told.unreadable = True
            told.mailbox.set_error(Internal(f"the worker sends an event that cannot be read: {error}"))
        return True

    def acknowledge(self, trajectory_ids: Iterable[str]) -> None:
        self._to_acknowledge += self._ledger.acknowledge(trajectory_ids)

    def give_up(self, batch_id: str, mailbox: Mailbox[Item]) -> None:
        batch = self._ledger.batches.get(batch_id)
        if batch is None or batch.mailbox is not mailbox:
            return
        done, running = self._ledger.give_up(batch)
        if mailbox.left:
            mailbox.set_error(ClientClosed(f"batch {batch_id} was closed before it ended"))
        self._to_acknowledge += done
        self._to_cancel += running

    def worker_restarted(self) -> None:
        self._to_acknowledge.clear()
        self._to_cancel.clear()

    def connected(self) -> None:
        self._reported_bytes = 0

    def due(self, received_bytes: int, threshold: int) -> bool:
        return received_bytes - self._reported_bytes >= threshold

    def flush(self, send: Callable[[RequestMessage], None], received_bytes: int, *, report: bool) -> None:
        """Send what is to be acknowledged and cancelled; the count of received bytes also alone if `report`."""
        while self._to_acknowledge or (report and received_bytes > self._reported_bytes):
            names, self._to_acknowledge = self._to_acknowledge[:MANY], self._to_acknowledge[MANY:]
            send(Ack(id=self._new_id(), trajectory_ids=tuple(names), received_bytes=received_bytes))
            self._reported_bytes = received_bytes
        while self._to_cancel:
            names, self._to_cancel = self._to_cancel[:MANY], self._to_cancel[MANY:]
            send(Cancel(id=self._new_id(), trajectory_ids=tuple(names)))
