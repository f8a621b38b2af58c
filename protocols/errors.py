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
from protocols.scalars import Scope as Scope


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
    """request_id: the id of the message that was refused, "" where it could not be read."""

    code = "bad_request"
    request_id: str = ""


class Duplicate(RolloutError):
    code = "duplicate"


class PrefixMismatch(RolloutError):
    code = "prefix_mismatch"


class PromptTooLong(RolloutError):
    code = "prompt_too_long"


class UnknownTrajectory(RolloutError):
    code = "unknown_trajectory"


class Overloaded(RolloutError):
    code = "overloaded"
    retryable = True


class Paused(RolloutError):
    code = "paused"
    retryable = True


class NotReady(RolloutError):
    code = "not_ready"
    retryable = True


class ShuttingDown(RolloutError):
    code = "shutting_down"
    retryable = True
    scope = "worker"


class StaleVersion(RolloutError):
    code = "stale_version"
    retryable = True


class WeightsInvalid(RolloutError):
    code = "weights_invalid"


class WeightsIncomplete(RolloutError):
    code = "weights_incomplete"


class WeightsBusy(RolloutError):
    code = "weights_busy"
    retryable = True


class NumericalError(RolloutError):
    code = "numerical_error"


class OutOfMemory(RolloutError):
    code = "out_of_memory"
    scope = "worker"


class EngineDead(RolloutError):
    code = "engine_dead"
    scope = "worker"


class Timeout(RolloutError, TimeoutError):
    code = "timeout"
    retryable = True


class Internal(RolloutError):
    code = "internal"


class ConnectionLost(RolloutError):
    """No worker answers at the address. Never sent: only the client can notice it."""

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
