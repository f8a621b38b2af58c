"""The engine in its thread: commands in, reports out, death and end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.handle import (
    Abort,
    Committed,
    CommitWeights,
    Pause,
    Ping,
    Prepared,
    PrepareWeights,
    Report,
    Resume,
    Submit,
)
from engine.handles.thread import ThreadEngine
from engine.request import Completion, Failure, Request
from engine.step import StepPlan
from tests.engine.host import PIECES, ask, assert_same, solo
from tests.fake_runner import FakeRunner, FakeTicket, FakeWeights


class GatedRunner(FakeRunner):
    """Launches only while `gate` is set; raises `error` from the next launch when there is one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def launch(self, plan: StepPlan) -> FakeTicket:
        self.entered.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return super().launch(plan)


class Listener:
    """Keeps every report; `until` waits for one that makes a condition true."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def __call__(self, report: Report) -> None:
        with self._changed:
            self.reports.append(report)
            self.threads.add(threading.get_ident())
            self._changed.notify_all()

    def until(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 20), self.reports

    @property
    def ended(self) -> dict[str, Completion]:
        ended = [completion for report in self.reports for completion in report.completions]
        assert len({c.request_id for c in ended}) == len(ended), "a second end"
        return {completion.request_id: completion for completion in ended}

    @property
    def weights(self) -> list[Any]:
        return [weights for report in self.reports for weights in report.weights]


class Rig:
    def __init__(self, lazy: bool) -> None:
        self.runner = GatedRunner(lazy=lazy)
        config = EngineConfig(max_running=8, max_step_tokens=48, max_context=256)
        engine = Engine(self.runner, config, PIECES, weight_version=1)
        self.runner.watch(engine._scheduler.pool)
        self.store = FakeWeights(self.runner)
        self.handle = ThreadEngine(engine, self.store)
        self.listener = Listener()
        self.handle.start(self.listener)

    def submit(self, *requests: Request) -> None:
        self.handle.send(Submit(requests))

    def wait(self, *names: str) -> dict[str, Completion]:
        self.listener.until(lambda: set(names) <= set(self.listener.ended))
        return self.listener.ended


@pytest.fixture
def rig(lazy: bool) -> Iterator[Rig]:
    rig = Rig(lazy)
    yield rig
    rig.runner.gate.set()
    assert rig.handle.close(20)


def test_requests_come_back_as_they_would_alone(rig: Rig) -> None:
    requests = [ask(f"{i}", 10 + i, 5 + 3 * i) for i in range(12)]
    rig.submit(*requests[:5])
    for request in requests[5:]:
        rig.submit(request)
    ended = rig.wait(*(request.id for request in requests))
    for request in requests:
        assert_same(ended[request.id], solo(request))
    assert len(rig.listener.threads) == 1
    stats = rig.listener.reports[-1].stats
    assert (stats.running, stats.waiting, stats.sampled_tokens_total) == (0, 0, sum(r.max_tokens for r in requests))


def test_there_is_at_most_one_report_a_step(rig: Rig) -> None:
    rig.submit(*(ask(f"{i}", 10, 5) for i in range(8)))
    rig.wait(*(f"{i}" for i in range(8)))
    steps = rig.listener.reports[-1].stats.steps_total
    assert len([report for report in rig.listener.reports if report.completions]) <= steps
    assert len(rig.listener.reports[0].completions) > 1, "ends of one step come together"


def test_a_refusal_is_an_end_that_names_the_field(rig: Rig) -> None:
    rig.submit(ask("good", 20, 3), ask("bad", []), ask("long", 256, 1))
    ended = rig.wait("good", "bad", "long")
    assert ended["good"].finish_reason == "length"
    assert ended["bad"].finish_reason == ended["long"].finish_reason == "error"
    assert ended["bad"].error is not None
    assert (ended["bad"].error.code, ended["bad"].error.field) == ("bad_request", "token_ids")
    assert ended["long"].error is not None
    assert ended["long"].error.code == "prompt_too_long"
    assert list(ended["bad"].logprobs) == ["processed"]
    assert len(ended["bad"].token_ids) == 0


def test_abort(rig: Rig) -> None:
    rig.runner.gate.clear()
    rig.submit(ask("a", 20, 50), ask("b", 20, 5))
    rig.handle.send(Abort(("a", "unknown"), "turn_deadline"))
    rig.runner.gate.set()
    ended = rig.wait("a", "b")
    assert ended["a"].finish_reason == "turn_deadline"
    assert ended["b"].finish_reason == "length"
    rig.handle.send(Abort(("a", "b"), "abort_client"))
    rig.submit(ask("c", 20, 2))
    rig.wait("c")
    assert set(rig.listener.ended) == {"a", "b", "c"}


def test_pause_and_resume(rig: Rig) -> None:
    rig.handle.send(Pause())
    rig.listener.until(lambda: rig.listener.reports and rig.listener.reports[-1].stats.paused)
    rig.submit(ask("a", 20, 3))
    rig.submit(ask("refused", []))
    rig.wait("refused")
    assert not rig.runner.plans
    rig.handle.send(Resume())
    assert rig.wait("a")["a"].finish_reason == "length"


def test_an_idle_engine_answers_a_ping_with_its_gauges(rig: Rig) -> None:
    rig.submit(ask("a", 20, 3))
    rig.wait("a")
    before = len(rig.listener.reports)
    for count in (1, 2):
        rig.handle.send(Ping())
        rig.listener.until(lambda count=count: len(rig.listener.reports) == before + count)
    assert rig.listener.reports[-1].stats == rig.listener.reports[-2].stats
    assert not rig.listener.reports[-1].completions


def test_an_engine_that_is_paused_answers_and_one_that_hangs_in_a_step_does_not(rig: Rig) -> None:
    rig.handle.send(Pause())
    rig.listener.until(lambda: rig.listener.reports and rig.listener.reports[-1].stats.paused)
    before = len(rig.listener.reports)
    rig.handle.send(Ping())
    rig.listener.until(lambda: len(rig.listener.reports) > before)
    rig.handle.send(Resume())
    rig.runner.gate.clear()
    rig.runner.entered.clear()
    rig.submit(ask("a", 20, 3))
    assert rig.runner.entered.wait(20)
    before = len(rig.listener.reports)
    rig.handle.send(Ping())
    assert not threading.Event().wait(0.05)
    assert len(rig.listener.reports) == before
    rig.runner.gate.set()
    rig.listener.until(lambda: len(rig.listener.reports) > before)
    assert rig.wait("a")["a"].finish_reason == "length"


def test_an_idle_engine_burns_no_time(rig: Rig) -> None:
    rig.submit(ask("a", 20, 3))
    rig.wait("a")
    clock = time.pthread_getcpuclockid(next(iter(rig.listener.threads)))
    # The thread may still be on its way to sleep.
    for _ in range(50):
        before = time.clock_gettime(clock)
        threading.Event().wait(0.05)
        if time.clock_gettime(clock) - before < 0.001:
            return
    pytest.fail("it spins")


def test_weights_are_prepared_while_steps_run(rig: Rig) -> None:
    entered, go = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert go.wait(20)

    rig.store.before_prepare = slow
    rig.handle.send(PrepareWeights("u", "5", 7))
    assert entered.wait(20)
    rig.submit(ask("a", 20, 5))
    rig.wait("a")
    assert rig.listener.weights == []
    go.set()
    rig.listener.until(lambda: rig.listener.weights)
    assert isinstance(rig.listener.weights[0], Prepared)
    rig.handle.send(CommitWeights("u"))
    rig.submit(ask("b", 20, 5))
    assert rig.wait("b")["b"].weight_versions == ((7, 5),)
    assert isinstance(rig.listener.weights[1], Committed)
    assert rig.listener.reports[-1].stats.weight_version == 7


def test_a_drain_times_out_though_nothing_else_happens(rig: Rig) -> None:
    rig.handle.send(PrepareWeights("u", "5", 7))
    rig.listener.until(lambda: rig.listener.weights)
    rig.runner.gate.clear()
    rig.submit(ask("a", 20, 200))
    rig.handle.send(Pause())
    rig.handle.send(CommitWeights("u", drain_timeout=0.02))
    rig.runner.gate.set()
    # Nothing had started when the engine was paused, or it is cut at the timeout: either way this ends.
    rig.listener.until(lambda: len(rig.listener.weights) == 2)
    assert isinstance(rig.listener.weights[1], Committed)


def test_a_drain_ends_with_the_last_running_request_though_nothing_else_happens(rig: Rig) -> None:
    rig.handle.send(PrepareWeights("u", "5", 7))
    rig.listener.until(lambda: rig.listener.weights)
    rig.runner.gate.clear()
    rig.submit(ask("a", 20, 5))
    assert rig.runner.entered.wait(20)
    rig.handle.send(CommitWeights("u", drain_timeout=600.0))
    rig.submit(ask("b", 20, 5))
    rig.runner.gate.set()
    assert rig.wait("a", "b")["b"].weight_versions == ((7, 5),)
    assert isinstance(rig.listener.weights[1], Committed)


def test_an_exception_in_the_loop_is_reported_once_and_ends_it(rig: Rig) -> None:
    rig.runner.gate.clear()
    rig.submit(ask("a", 20, 50))
    assert rig.runner.entered.wait(20)
    rig.submit(ask("refused", []))
    rig.runner.error = RuntimeError("the device is lost")
    rig.runner.gate.set()
    rig.listener.until(lambda: rig.listener.reports and rig.listener.reports[-1].died)
    *_, last = rig.listener.reports
    assert last.died == Failure("engine_dead", "RuntimeError: the device is lost")
    assert rig.listener.ended.keys() <= {"refused"}
    rig.submit(ask("late", 20, 5))
    assert rig.handle.close(20)
    assert rig.listener.reports[-1] is last, "it is its last word"


def test_close_drops_what_runs_and_is_final(lazy: bool) -> None:
    rig = Rig(lazy)
    rig.runner.gate.clear()
    rig.submit(ask("a", 20, 200))
    assert rig.runner.entered.wait(20)
    assert not rig.handle.close(0.0), "it stopped in the middle of a launch"
    rig.runner.gate.set()
    assert rig.handle.close(20)
    assert rig.handle.close(20)
    with pytest.raises(RuntimeError, match="closed"):
        rig.submit(ask("b"))


def test_close_before_start(lazy: bool) -> None:
    runner = FakeRunner(lazy=lazy)
    handle = ThreadEngine(Engine(runner, EngineConfig()), FakeWeights(runner))
    assert handle.close(1.0)


def test_start_is_called_once(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="started before"):
        rig.handle.start(rig.listener)
