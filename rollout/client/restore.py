"""What a restarted worker has lost and this client still knows: the weights, then the work."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any, Protocol

from protocols.errors import RolloutError
from protocols.replies import WeightsCommitted, Welcome
from protocols.requests import Cancel, CommitWeightsRequest, PrepareWeightsRequest, RequestMessage
from rollout.client.ledger import Kept, Ledger
from rollout.client.waiting import Steps

log = logging.getLogger(__name__)

RETRY_S = 1.0
DRAIN_S = 60.0


class Asker(Protocol):
    """What a step of the I/O thread may wait for. A lost connection ends its procedures."""

    def new_id(self) -> str: ...
    def ask(self, message: RequestMessage) -> Future[Any]: ...
    def sleep(self, seconds: float) -> Future[None]: ...


class Weights:
    """The last weights that this client committed, and those it has prepared."""

    def __init__(self) -> None:
        self._prepared: dict[str, PrepareWeightsRequest] = {}
        self._last: tuple[PrepareWeightsRequest, WeightsCommitted] | None = None

    def asked(self, request: PrepareWeightsRequest) -> None:
        self._prepared[request.update_id] = request

    def forget(self, update_id: str) -> None:
        self._prepared.pop(update_id, None)

    def committed(self, reply: WeightsCommitted) -> None:
        request = self._prepared.pop(reply.update_id, None)
        if request is not None:
            self._last = request, reply

    def missing_from(self, welcome: Welcome) -> bool:
        """Does the worker serve something older? Newer weights are another client's and stay."""
        if self._last is None:
            return False
        _, reply = self._last
        return welcome.weight_version < reply.version or (
            welcome.weight_version == reply.version and welcome.weight_digest != reply.digest
        )

    def restore(self, asker: Asker) -> Steps[None]:
        """Prepare and commit the last weights again. Raises what the worker refuses for good."""
        assert self._last is not None
        request, reply = self._last
        while True:
            update_id = f"restore-{asker.new_id()}"
            try:
                yield asker.ask(request.model_copy(update={"id": asker.new_id(), "update_id": update_id}))
                commit = CommitWeightsRequest(
                    id=asker.new_id(),
                    update_id=update_id,
                    version=reply.version,
                    digest=reply.digest,
                    drain_timeout_s=DRAIN_S,
                )
                yield asker.ask(commit)
            except RolloutError as error:
                if not error.retryable:
                    raise
                log.info("weights cannot be restored yet: %s", error)
                yield asker.sleep(RETRY_S)
            else:
                return


def resubmit(asker: Asker, ledger: Ledger, kept: Kept) -> Steps[None]:
    """Submit what is open of a batch until the worker accepts it. Raises what it refuses for good."""
    while (message := ledger.start_again(asker.new_id(), kept)) is not None:
        try:
            yield asker.ask(message)
        except RolloutError as error:
            if not error.retryable:
                raise
            yield asker.sleep(RETRY_S)
            continue
        kept.accepted = True
        if kept.cancelled:
            yield asker.ask(Cancel(id=asker.new_id(), trajectory_ids=tuple(kept.cancelled)))
        return
