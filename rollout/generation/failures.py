"""The engine's failures in the wire's terms."""

from __future__ import annotations

from engine.request import Failure
from protocols.errors import ERRORS, Internal, RolloutError
from protocols.fields import Scope


def wire_error(failure: Failure, scope: Scope = "request") -> RolloutError:
    """The wire's exception; `internal` for a code that the wire does not know. What costs the worker says so itself."""
    kind = ERRORS.get(failure.code, Internal)
    return kind(failure.message, field=failure.field, scope="worker" if kind.scope == "worker" else scope)
