"""Buffers are claimed in turn, never before they are free; steps are waited for once and in order."""

from __future__ import annotations

import numpy as np
import pytest

from engine.runner.ring import RING, Ring
from engine.step import StepOutput

NOTHING = StepOutput(np.empty(0, np.int32), np.empty((3, 0), np.float32), np.empty(0, np.uint8))


def test_a_buffer_is_claimed_again_once_its_step_was_waited_for() -> None:
    ring = Ring()
    tickets = []
    for turn in range(2 * RING):
        assert ring.claim() == turn % RING
        tickets.append(ring.launch(lambda: NOTHING))
        if len(tickets) == RING:
            with pytest.raises(RuntimeError, match="not waited for"):
                ring.claim()
            assert tickets.pop(0).wait() is NOTHING


def test_each_step_is_waited_for_once_and_in_order() -> None:
    ring = Ring()
    first, second = ring.launch(lambda: NOTHING), ring.launch(lambda: NOTHING)
    with pytest.raises(RuntimeError, match="where 0 is next"):
        second.wait()
    first.wait()
    with pytest.raises(RuntimeError, match="where 1 is next"):
        first.wait()
    second.wait()


def test_a_step_that_fails_was_not_waited_for() -> None:
    ring = Ring()

    def fail() -> StepOutput:
        raise ValueError("no device")

    ticket = ring.launch(fail)
    with pytest.raises(ValueError, match="no device"):
        ticket.wait()
    assert (ring.launched, ring.waited) == (1, 0)
