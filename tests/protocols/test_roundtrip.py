"""Whatever can be built can be sent, and arrives equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocols import Limits, decode_reply, decode_request, encode, fingerprint
from protocols.codec import REPLIES, REQUESTS
from tests.protocols.strategies import value

LIMITS = Limits()
THOROUGH = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@pytest.mark.parametrize("kind", sorted(REQUESTS))
@given(data=st.data())
@THOROUGH
def test_requests_arrive_equal(kind: str, data: Any) -> None:
    message = data.draw(value(REQUESTS[kind]))
    frames = [bytes(frame) for frame in encode(message)]
    received = decode_request(frames, LIMITS)
    assert received == message
    assert type(received) is REQUESTS[kind]
    assert fingerprint(received) == fingerprint(message)


@pytest.mark.parametrize("kind", sorted(REPLIES))
@given(data=st.data())
@THOROUGH
def test_replies_arrive_equal(kind: str, data: Any) -> None:
    message = data.draw(value(REPLIES[kind]))
    frames = [bytes(frame) for frame in encode(message)]
    received = decode_reply(frames, LIMITS)
    assert received == message
    assert type(received) is REPLIES[kind]
    assert fingerprint(received) == fingerprint(message)
