"""What the child says to a parent that is slow. (All else of it is tested through the whole, in test_process.)"""

from __future__ import annotations

from engine.handle import EngineStats, Report, WeightsFailed
from engine.handles.child import condensed
from engine.handles.log_line import LogLine
from engine.request import Failure, refusal
from tests.engine.host import ask

DEAD = Failure("engine_dead", "it is gone")


def test_reports_that_waited_together_become_one() -> None:
    line, ends = LogLine("a", 20, "text", 0.0), [refusal(ask(name), DEAD) for name in "abc"]
    failed = WeightsFailed("u", DEAD)
    first = Report((ends[0], ends[1]), (), EngineStats(steps_total=1))
    second = Report((), (failed,), EngineStats(steps_total=2))
    third = Report((ends[2],), (), EngineStats(steps_total=3), DEAD)
    assert condensed([first, line, second, third]) == [
        line,
        Report(tuple(ends), (failed,), EngineStats(steps_total=3), DEAD),
    ]
    assert condensed([line, second]) == [line, second]
