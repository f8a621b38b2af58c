"""The I/O thread: carries out what other threads ask for and keeps decision 15's promise over lost connections.

After a restart of the worker: first the weights, then what is open, then the requests that still wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from protocols.codec import encode
from protocols.errors import BadRequest, Internal, RolloutError, Timeout, from_failure
from protocols.fields import Group
from protocols.replies import ErrorReply, Ok, Pong, Reply, WeightsCommitted, Welcome, WorkerStatus, is_event
from protocols.requests import AbortWeightsRequest, Cancel, PrepareWeightsRequest, RequestMessage, SubmitBatch
from rollout.client.connection import FOREVER, Connection
from rollout.client.delivery import Delivery
from rollout.client.ledger import Item, Ledger
from rollout.client.link import Link
from rollout.client.pending import Greeted, Pending, PendingTable
from rollout.client.recovery import Recovery
from rollout.client.waiting import Mailbox, fail, settle

log = logging.getLogger(__name__)

LATE_S = 10.0
"""Whoever waits so long for weights should know for which."""
ACK_S = 0.005
"""What is acknowledged within so long leaves in one message: one for each result would cost both ends as much again as
the result, and most where many end at once."""


class Loop:
    """Every method runs on the I/O thread. acked: ids that other threads have acknowledged, of which `acknowledge_soon`
    tells. published, served: called with each welcome, and with the version of the weights whenever the worker says
    it, for other threads to read."""

    def __init__(
        self,
        link: Link,
        *,
        name: str,
        session: str | None,
        timeout: float,
        reconnect_timeout: float,
        new_id: Callable[[], str],
        ack: Callable[[str], None],
        acked: deque[str],
        published: Callable[[Welcome], None],
        served: Callable[[int], None],
    ) -> None:
        self._new_id = new_id
        self._acked = acked
        self._acks_at = FOREVER
        self._link = link
        self._reconnect_timeout = reconnect_timeout
        self._published = published
        self._served = served
        self._connection = Connection(link, self, name=name, session=session, timeout=timeout, new_id=new_id)
        self._ledger = Ledger()
        self._delivery = Delivery(self._ledger, ack=ack, new_id=new_id)
        self._recovery = Recovery(self._ledger, ask=self._ask, new_id=new_id, timeout=timeout)
        self._pending = PendingTable()
        self._greeted = Greeted()
        self._welcome: Welcome | None = None
        self._ready = False
        self._fatal: RolloutError | None = None  # no worker will ever answer
        self._notice: RolloutError | None = None  # nobody answers at present
        self._closing = False
        self._cancel_at_close = True

    def run(self, obey: Callable[[], None]) -> None:
        """obey: carries out what other threads have asked for."""
        while not self._closing:
            self._link.wait(self._next_deadline() - time.monotonic())
            obey()
            self._connection.advance()
            self._delivery.wake()
            now = time.monotonic()
            self._tick(now)
            self._flush(report=False, acks=now >= self._acks_at)
        if self._cancel_at_close:
            for batch in list(self._ledger.batches.values()):
                self._delivery.give_up(batch.message.batch_id, batch.mailbox)
        self._flush(report=True)

    def finish(self, error: RolloutError) -> None:
        """Tell everybody who waits that nothing more will come."""
        for pending in self._pending.take_all():
            fail(pending.future, error)
        self._greeted.fail(lambda _: error)
        self._ledger.tell(error)

    def _next_deadline(self) -> float:
        return min(
            self._acks_at,
            self._greeted.next_deadline(),
            self._connection.next_deadline(),
            self._pending.next_deadline(),
            self._recovery.procedures.next_deadline(),
        )

    def _tick(self, now: float) -> None:
        for pending in self._pending.take_expired(now):
            self._expire(pending)
        self._greeted.fail(self._connection.no_worker, now)
        self._recovery.procedures.wake(now)
        away = now - self._connection.down_since
        if not self._connection.up and self._fatal is None and self._notice is None and away >= self._reconnect_timeout:
            self._notice = self._connection.no_worker(away)
            self._ledger.tell(self._notice)

    # What other threads ask for

    def request(self, pending: Pending) -> None:
        if self._fatal is not None:
            fail(pending.future, self._fatal)
            return
        if isinstance(pending.message, PrepareWeightsRequest):
            self._recovery.preparing(pending.message)
        self._pending.add(pending)
        if self._ready:
            self._send_pending(pending)

    def submit(
        self,
        message: SubmitBatch,
        pending: Pending,
        mailbox: Mailbox[Item],
        auto_ack: bool,
        resumed: tuple[Group, ...] = (),
    ) -> None:
        error = self._fatal or self._recovery.blocked
        if error is not None:
            fail(pending.future, error)
            return
        self._take_acks()
        self._delivery.acknowledge(record.trajectory_id for record in message.partials)  # handed back, so taken over
        try:
            pending.batch = self._ledger.add(message, mailbox, auto_ack, resumed)
        except RolloutError as duplicate:
            fail(pending.future, duplicate)
            return
        if self._notice is not None:
            mailbox.set_error(self._notice)
        self.request(pending)

    def greeted(self, future: Future[Welcome], timeout: float) -> None:
        if self._fatal is not None:
            fail(future, self._fatal)
        elif self._welcome is not None:
            settle(future, self._welcome)
        else:
            self._greeted.add(future, timeout)

    def acknowledge_soon(self) -> None:
        self._acks_at = min(self._acks_at, time.monotonic() + ACK_S)

    def give_up(self, batch_id: str, mailbox: Mailbox[Item]) -> None:
        self._delivery.give_up(batch_id, mailbox)

    def forget_update(self, update_id: str) -> None:
        self._recovery.forget(update_id)
        if self._ready:
            self._connection.send(AbortWeightsRequest(id=self._new_id(), update_id=update_id))

    def close(self, cancel: bool) -> None:
        self._closing = True
        self._cancel_at_close = cancel
        if cancel and self._ledger.open_count:
            log.warning("closed with %d trajectories open, which are cancelled", self._ledger.open_count)

    # What the connection reports

    def welcomed(self, welcome: Welcome) -> None:
        restarted = self._welcome is not None and welcome.boot_id != self._welcome.boot_id
        if restarted or not welcome.resumed:
            self._delivery.worker_restarted()
            for batch in self._ledger.batches.values():
                batch.accepted = False
        self._welcome = welcome
        self._delivery.connected()
        self._published(welcome)
        self._served(welcome.weight_version)
        self._greeted.settle(welcome)
        if self._notice is not None:
            self._ledger.untell(self._notice)
            self._notice = None
        self._recovery.welcomed(welcome, restarted=restarted, ready=self._go_on)

    def _go_on(self) -> None:
        """The worker serves the right weights, or cannot: then nothing may be submitted to it."""
        self._ready = True
        blocked = self._recovery.blocked
        if blocked is None:
            self._resubmit()
        for pending in self._pending:
            if pending.batch is not None and blocked is not None:
                self._pending.take(pending.message.id)
                self._ledger.forget(pending.batch)
                fail(pending.future, blocked)
            elif not pending.internal:
                self._send_pending(pending)

    def lost(self) -> None:
        self._ready = False
        self._recovery.procedures.stop_all()
        self._pending.connection_lost()

    def refused(self, error: RolloutError) -> None:
        self._fatal = error
        self.finish(error)

    def received(self, message: Reply) -> None:
        if isinstance(message, Pong | WorkerStatus):
            self._told_version(message.weight_version)
        if is_event(message):
            self._delivery.event(message)
        elif isinstance(message, ErrorReply) and message.error.code == "not_ready" and message.error.scope == "session":
            self._connection.reset("the worker knows no session on it")
        elif (pending := self._pending.take(message.id)) is not None:
            self._reply(pending, message)
        elif isinstance(message, ErrorReply) and not message.id:
            log.error("the worker could not read a request: %s", message.error.message)

    def counted(self, window_bytes: int) -> None:
        if self._delivery.due(self._connection.received_bytes, window_bytes // 2):
            self._flush(report=True)
            self._delivery.wake()

    def unreadable(self, error: BadRequest) -> bool:
        pending = self._pending.take(error.request_id)
        if pending is None:
            return self._delivery.unreadable(error)
        if pending.batch is not None:
            self.give_up(pending.batch.message.batch_id, pending.batch.mailbox)
        fail(pending.future, Internal(f"the worker's reply cannot be read: {error}"))
        return True

    def pinged(self) -> None:
        self._flush(report=True)

    def _told_version(self, version: int) -> None:
        self._served(version)
        for line in self._ledger.late(version, LATE_S):
            log.warning("%s: update_weights, or cancel them", line)

    def _reply(self, pending: Pending, message: Reply) -> None:
        if isinstance(message, ErrorReply):
            self._error_reply(pending, message)
            return
        if pending.batch is not None:
            pending.batch.accepted = True
            if pending.future.cancelled():
                self.give_up(pending.batch.message.batch_id, pending.batch.mailbox)
        if isinstance(pending.message, Cancel):
            self._ledger.cancelled(pending.message)
        if isinstance(message, WeightsCommitted):
            self._served(message.version)
        if isinstance(message, WeightsCommitted) and self._recovery.committed(message):
            self._resubmit()
        settle(pending.future, message)

    def _error_reply(self, pending: Pending, message: ErrorReply) -> None:
        if self._answers_older_turn(pending):
            settle(pending.future, Ok(id=message.id))
            return
        if pending.batch is not None:
            self._ledger.forget(pending.batch)
        fail(pending.future, from_failure(message.error))

    # Parts of these

    def _resubmit(self) -> None:
        self._recovery.resubmit({pending.batch for pending in self._pending if pending.batch is not None})

    def _ask(self, message: RequestMessage, timeout: float) -> Future[Any]:
        """For what this thread itself waits for."""
        future: Future[Any] = Future()
        pending = Pending(message, encode(message), future, time.monotonic() + timeout, timeout, internal=True)
        self._pending.add(pending)
        self._send_pending(pending)
        return future

    def _expire(self, pending: Pending) -> None:
        if pending.batch is not None and pending.sent_before:
            self.give_up(pending.batch.message.batch_id, pending.batch.mailbox)
        elif pending.batch is not None:
            self._ledger.forget(pending.batch)
        if self._connection.up:
            what, address = type(pending.message).__name__, self._link.address
            fail(pending.future, Timeout(f"no reply to {what} from {address} in {pending.timeout:g} s"))
        else:
            fail(pending.future, self._connection.no_worker(pending.timeout))

    def _answers_older_turn(self, pending: Pending) -> bool:
        """A `continue` to a trajectory that has started again since."""
        return pending.turn is not None and self._ledger.is_stale(*pending.turn)

    def _send_pending(self, pending: Pending) -> None:
        if self._answers_older_turn(pending):
            self._pending.take(pending.message.id)
            settle(pending.future, Ok(id=pending.message.id))
            return
        self._flush(report=False)  # ids that were acknowledged first must be free first
        pending.sent_before = True
        self._connection.send_frames(pending.frames)

    def _take_acks(self) -> None:
        self._acks_at = FOREVER
        while self._acked:
            self._delivery.acknowledge((self._acked.popleft(),))

    def _flush(self, *, report: bool, acks: bool = True) -> None:
        if acks:
            self._take_acks()
        if self._connection.up:
            self._delivery.flush(self._connection.send, self._connection.received_bytes, report=report)
