"""Errors cross the wire and come out as they went in."""

from __future__ import annotations

import pytest

from protocols import ERRORS, BadRequest, ErrorReply, Failure, Internal, Limits, RolloutError, decode_reply, encode
from protocols.errors import from_failure

CODES = [
    "bad_request",
    "duplicate",
    "prefix_mismatch",
    "prompt_too_long",
    "unknown_trajectory",
    "overloaded",
    "paused",
    "not_ready",
    "shutting_down",
    "stale_version",
    "weights_invalid",
    "weights_incomplete",
    "weights_busy",
    "numerical_error",
    "out_of_memory",
    "engine_dead",
    "timeout",
    "internal",
]


def test_the_tree_holds_every_code_of_the_wire_and_the_clients_own() -> None:
    assert list(ERRORS) == [*CODES, "connection_lost"]
    assert all(issubclass(error, RolloutError) for error in ERRORS.values())


@pytest.mark.parametrize("code", CODES)
def test_an_error_survives_the_wire(code: str) -> None:
    error = ERRORS[code]("what happened", field="groups[0].prompt", scope="batch")
    reply = decode_reply(encode(ErrorReply(id="1", error=error.failure(stage="step"))), Limits())
    assert isinstance(reply, ErrorReply)
    received = from_failure(reply.error)
    assert type(received) is type(error)
    assert (received.message, received.field, received.scope) == (error.message, error.field, "batch")
    assert received.retryable == error.retryable == reply.error.retryable
    assert reply.error.stage == "step"


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    retryable = {code for code in CODES if ERRORS[code].retryable}
    assert retryable == {
        "overloaded",
        "paused",
        "not_ready",
        "shutting_down",
        "stale_version",
        "weights_busy",
        "timeout",
    }


def test_a_code_of_a_later_build_is_internal() -> None:
    received = from_failure(Failure(code="sleepy", message="zzz", retryable=True))
    assert type(received) is Internal
    assert any("sleepy" in note for note in received.__notes__)


def test_a_timeout_is_a_timeout_error_too() -> None:
    assert issubclass(ERRORS["timeout"], TimeoutError)


def test_a_refusal_does_not_know_an_id_by_itself() -> None:
    assert BadRequest("no").request_id == ""
