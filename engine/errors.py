"""The engine's error tree.

EngineError
├── RequestError          one request is refused; nobody else is touched
│   ├── PromptTooLong
│   ├── RequestTooLarge   it cannot fit in the whole KV pool, even alone
│   └── DuplicateRequest  a live request has this id
├── WeightsError          a checkpoint is refused; the old weights serve on
│   ├── WeightsInvalid    a wrong name, shape, dtype, value or checksum
│   ├── WeightsIncomplete a file or tensor is missing or cut short
│   └── WeightsBusy       another update is under way
└── OutOfMemory           the memory plan does not fit the device

Every error carries the `code` that goes over the wire and, where there is one, the `field` it is about. What goes
wrong with a request that runs is no exception but the `Failure` of its `Completion`.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""

    code = "internal"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class RequestError(EngineError):
    code = "bad_request"


class PromptTooLong(RequestError):
    code = "prompt_too_long"


class RequestTooLarge(RequestError):
    code = "bad_request"


class DuplicateRequest(RequestError):
    code = "duplicate"


class WeightsError(EngineError):
    code = "weights_invalid"


class WeightsInvalid(WeightsError):
    code = "weights_invalid"


class WeightsIncomplete(WeightsError):
    code = "weights_incomplete"


class WeightsBusy(WeightsError):
    code = "weights_busy"


class OutOfMemory(EngineError):
    code = "out_of_memory"
