"""Every error that crosses the wire, by code, and the exception that stands for it at both ends.

RolloutError
├── BadRequest, Duplicate, PrefixMismatch, PromptTooLong, UnknownTrajectory      mend the request
├── Overloaded, Paused, NotReady, ShuttingDown, StaleVersion, Timeout            try later, or elsewhere
├── WeightsInvalid, WeightsIncomplete, WeightsBusy                               the old weights serve on
├── NumericalError, OutOfMemory, EngineDead, Internal                            look at the worker
└── ConnectionLost                                                               raised by the client alone
"""

from __future__ import annotations

from typing import ClassVar

from protocols.records import Failure
from protocols.scalars import Scope


class RolloutError(Exception):
    """Base: carries what the wire carries (`code`, `retryable`, `scope`, `field`)."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    scope: Scope = "request"

    def __init__(self, message: str, *, field: str | None = None, scope: Scope | None = None) -> None:
        super().__init__(f"{message} [{field}]" if field else message)
        self.message = message
        self.field = field
        if scope is not None:
            self.scope = scope

    def failure(self, stage: str | None = None) -> Failure:
        return Failure(
            code=self.code,
            message=self.message,
            retryable=self.retryable,
            scope=self.scope,
            field=self.field,
            stage=stage,
        )


class BadRequest(RolloutError):
    """The message breaks the protocol, a limit or a rule; `field` says where. Mend it: a repeat fails again.

    request_id: the id of the message that was refused, "" where it could not be read.
    """

    code = "bad_request"
    request_id: str = ""


class Duplicate(RolloutError):
    """A live trajectory or group has this id and other content. Choose another id, or repeat the same content."""

    code = "duplicate"


class PrefixMismatch(RolloutError):
    """A `continue` does not follow on the trajectory as it stands. Answer the newest `turn_done` of it."""

    code = "prefix_mismatch"


class PromptTooLong(RolloutError):
    """The ids leave no room for a sampled token within the context limit. Shorten them."""

    code = "prompt_too_long"


class UnknownTrajectory(RolloutError):
    """The session has no such trajectory, or it waits for no answer. Submit it again if it is still wanted."""

    code = "unknown_trajectory"


class Overloaded(RolloutError):
    """There is no room for more work now. Acknowledge results and submit again, or go to another worker."""

    code = "overloaded"
    retryable = True


class Paused(RolloutError):
    """The engine is paused, so the answer would not come. Send `resume`, then ask again."""

    code = "paused"
    retryable = True


class NotReady(RolloutError):
    """The connection has no session, or the worker is still starting. Say `hello`, then ask again."""

    code = "not_ready"
    retryable = True


class ShuttingDown(RolloutError):
    """The worker takes no new work. Go to another worker, or wait for the next one at this address."""

    code = "shutting_down"
    retryable = True
    scope = "worker"


class StaleVersion(RolloutError):
    """Weights of `min_version` did not serve before the deadline. Update the weights, then submit again."""

    code = "stale_version"
    retryable = True


class WeightsInvalid(RolloutError):
    """The weights are not those of the served model, or not sound. The old ones serve on; write them again."""

    code = "weights_invalid"


class WeightsIncomplete(RolloutError):
    """A file or tensor is missing or cut short. The old weights serve on; prepare again once all is written."""

    code = "weights_incomplete"


class WeightsBusy(RolloutError):
    """Another update is under way, or the drain timed out. Wait for its end, then ask again."""

    code = "weights_busy"
    retryable = True


class NumericalError(RolloutError):
    """The model gave numbers that are not finite. The trajectory failed; look at the weights."""

    code = "numerical_error"


class OutOfMemory(RolloutError):
    """The device has no memory left. Start the worker with less of it reserved, or smaller batches."""

    code = "out_of_memory"
    scope = "worker"


class EngineDead(RolloutError):
    """The engine has stopped and cannot go on. Restart the worker; the client submits again what is open."""

    code = "engine_dead"
    scope = "worker"


class Timeout(RolloutError, TimeoutError):
    """No answer came in time, and whether the request had effect is unknown. Ask again: requests are idempotent."""

    code = "timeout"
    retryable = True


class Internal(RolloutError):
    """A fault of the worker's own. Its log has the traceback; report it."""

    code = "internal"


class ConnectionLost(RolloutError):
    """No worker answers at the address. Start one, or mend the address. Never sent: only the client notices it."""

    code = "connection_lost"
    retryable = True


ERRORS: dict[str, type[RolloutError]] = {
    error.code: error
    for error in (
        BadRequest,
        Duplicate,
        PrefixMismatch,
        PromptTooLong,
        UnknownTrajectory,
        Overloaded,
        Paused,
        NotReady,
        ShuttingDown,
        StaleVersion,
        WeightsInvalid,
        WeightsIncomplete,
        WeightsBusy,
        NumericalError,
        OutOfMemory,
        EngineDead,
        Timeout,
        Internal,
        ConnectionLost,
    )
}


def from_failure(failure: Failure) -> RolloutError:
    """The exception for a received failure; a code that this build does not know becomes `Internal`."""
    error = ERRORS.get(failure.code, Internal)(failure.message, field=failure.field, scope=failure.scope)
    error.add_note(f"code {failure.code}, retryable {failure.retryable}")
    return error
