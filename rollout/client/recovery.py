"""What a restarted worker has lost and this client still knows: first the weights, then the work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from protocols.errors import RolloutError
from protocols.replies import WeightsCommitted, Welcome
from protocols.requests import Cancel, CommitWeightsRequest, PrepareWeightsRequest, RequestMessage
from rollout.client.ledger import Ledger, Submitted
from rollout.client.procedures import Procedures
from rollout.client.waiting import Steps

log = logging.getLogger(__name__)

RETRY_S = 1.0
DRAIN_S = 60.0
WEIGHTS_S = 3600.0
"""Bound on one attempt to read or to commit weights again, so that a worker that never answers is asked anew."""


class Recovery:
    """ask: sends a request and gives its reply, or the error after so many seconds. timeout: for each submit."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        ask: Callable[[RequestMessage, float], Future[Any]],
        new_id: Callable[[], str],
        timeout: float,
    ) -> None:
        self._ledger = ledger
        self._ask = ask
        self._new_id = new_id
        self._timeout = timeout
        self._prepared: dict[str, PrepareWeightsRequest] = {}
        self._committed: tuple[PrepareWeightsRequest, WeightsCommitted] | None = None
        self._weights_lost = False
        self.procedures = Procedures()
        self.blocked: RolloutError | None = None
        """Why the worker cannot have its weights back; what is open waits for the next `update_weights`."""

    # Weights

    def preparing(self, request: PrepareWeightsRequest) -> None:
        self._prepared[request.update_id] = request

    def forget(self, update_id: str) -> None:
        self._prepared.pop(update_id, None)

    def committed(self, reply: WeightsCommitted) -> bool:
        """These serve now, and are what a restarted worker gets. True when that was what open work waited for."""
        request = self._prepared.pop(reply.update_id, None)
        if request is not None:
            self._committed = request, reply
        waited, self._weights_lost = self.blocked is not None, False
        self._block(None)
        return waited

    def welcomed(self, welcome: Welcome, *, restarted: bool, ready: Callable[[], None]) -> None:
        """Calls `ready` when the worker serves the last weights of this client, or newer ones, or cannot."""
        if restarted:
            self._weights_lost = self._misses(welcome)
        if not self._weights_lost or not self._misses(welcome):
            self._weights_restored(ready, None)
            return
        log.warning("the worker has restarted with older weights; restoring them")
        self.procedures.start(self._restore(), partial(self._weights_restored, ready))

    def _misses(self, welcome: Welcome) -> bool:
        if self._committed is None:
            return False
        _, reply = self._committed
        return welcome.weight_version < reply.version or (
            welcome.weight_version == reply.version and welcome.weight_digest != reply.digest
        )

    def _restore(self) -> Steps[None]:
        """Raises what the worker refuses for good."""
        assert self._committed is not None
        request, reply = self._committed
        while True:
            update_id = f"restore-{self._new_id()}"
            again = request.model_copy(update={"id": self._new_id(), "update_id": update_id})
            commit = CommitWeightsRequest(
                id=self._new_id(),
                update_id=update_id,
                version=reply.version,
                digest=reply.digest,
                drain_timeout_s=DRAIN_S,
            )
            try:
                yield self._ask(again, WEIGHTS_S)
                yield self._ask(commit, WEIGHTS_S)
            except RolloutError as error:
                if not error.retryable:
                    raise
                log.info("weights cannot be restored yet: %s", error)
                yield self.procedures.sleep(RETRY_S)
            else:
                return

    def _weights_restored(self, ready: Callable[[], None], error: RolloutError | None) -> None:
        self._weights_lost = error is not None
        self._block(error)
        ready()

    def _block(self, error: RolloutError | None) -> None:
        if error is not None:
            self._ledger.tell(error)
        elif self.blocked is not None:
            self._ledger.untell(self.blocked)
        self.blocked = error

    # Work

    def resubmit(self, submitting: set[Submitted]) -> None:
        """What the worker has not accepted, except those whose first submit still waits for its reply."""
        for batch in list(self._ledger.batches.values()):
            if not batch.accepted and batch not in submitting:
                self.procedures.start(self._submit(batch), partial(self._submitted, batch))

    def _submit(self, batch: Submitted) -> Steps[None]:
        """Until the worker accepts. Raises what it refuses for good."""
        while (message := self._ledger.start_again(self._new_id(), batch)) is not None:
            try:
                yield self._ask(message, self._timeout)
            except RolloutError as error:
                if not error.retryable:
                    raise
                yield self.procedures.sleep(RETRY_S)
                continue
            batch.accepted = True
            if batch.cancelled:
                yield self._ask(Cancel(id=self._new_id(), trajectory_ids=tuple(batch.cancelled)), self._timeout)
            return

    def _submitted(self, batch: Submitted, error: RolloutError | None) -> None:
        if batch.refusal is not None:
            batch.mailbox.clear_error(batch.refusal)
        batch.refusal = None if batch.accepted else error
        if batch.refusal is not None:
            log.error("batch %s was refused after a restart: %s", batch.message.batch_id, batch.refusal)
            batch.mailbox.set_error(batch.refusal)
