from __future__ import annotations

import math

import pytest

from rollout.service.repeated import Repeated


def test_it_is_told_at_once_then_once_a_minute_for_all_that_came_since(caplog: pytest.LogCaptureFixture) -> None:
    fault = Repeated("lost replies")

    def told(now: float) -> list[str]:
        caplog.clear()
        fault.tell(now)
        return [record.getMessage() for record in caplog.records]

    assert told(100.0) == []
    for _ in range(3):
        fault.count("that to a")
    assert told(100.5) == ["lost replies: 3, the last that to a"]
    assert told(101.0) == []
    for i in range(1000):
        fault.count(f"that to {i}")
        assert told(101.0 + i / 20) == []
    assert told(160.5) == ["lost replies: 1000, the last that to 999"]
    fault.count("that to c")
    assert told(161.0) == []
    assert told(math.inf) == ["lost replies: 1, the last that to c"]
    assert fault.total == 1004
