"""The engine in a process of its own: the same answers as in a thread, and an end to everybody's wait if it dies."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import pytest

from engine.config import EngineConfig
from engine.errors import EngineError, WeightsIncomplete, WeightsInvalid
from engine.handle import (
    Abort,
    Committed,
    CommitWeights,
    EngineHandle,
    Pause,
    Prepared,
    PrepareWeights,
    Report,
    Resume,
    Submit,
)
from engine.handles.process import ProcessEngine
from engine.handles.thread import ThreadEngine
from engine.request import Completion, Failure, Request, SamplingParams
from engine.start.build import load_engine
from engine.start.recipe import EngineRecipe
from tests import rigs
from tests.engine.child_engines import recipe
from tests.engine.handles.test_thread import Listener
from tests.engine.host import ask, assert_same, solo

ROOT = Path(__file__).parents[3]


@contextmanager
def running(name: str = "fake", deliver: Callable[[Report], None] | None = None, **options: Any) -> Iterator[Rig]:
    rig = Rig(recipe(name, **options), deliver)
    try:
        yield rig
    finally:
        rig.engine.close(10)
        assert gone(rig.engine.pid)


class Rig:
    """deliver: called before the listener hears of a report."""

    def __init__(self, how: EngineRecipe, deliver: Callable[[Report], None] | None = None) -> None:
        self.listener = Listener()
        self.engine = ProcessEngine(how)
        self.engine.start(self.listener if deliver is None else lambda report: (deliver(report), self.listener(report)))

    def submit(self, *requests: Request) -> None:
        self.engine.send(Submit(requests))

    def wait(self, *names: str) -> dict[str, Completion]:
        self.listener.until(lambda: set(names) <= set(self.listener.ended))
        return self.listener.ended

    @property
    def last(self) -> Report:
        return self.listener.reports[-1]


def gone(pid: int) -> bool:
    """No such process, not even a zombie of ours. (Orphans are others' to reap.)"""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], bool], seconds: float) -> float:
    """How long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it never happened"
        time.sleep(0.01)
    return time.monotonic() - start


# The real engine.

CONFIG = EngineConfig(max_running=8, max_step_tokens=64, max_context=256)
REQUESTS = [
    Request(
        str(i),
        np.random.default_rng(i).integers(0, 512, 5 + 7 * i).astype(np.int32),
        8,
        SamplingParams(temperature=i % 3, seed=i, top_k=20 * (i % 2), repetition_penalty=1 + i / 10),
        logprob_modes=("processed", "raw"),
        top_logprobs=i % 3,
        prompt_logprobs=i == 4,
    )
    for i in range(8)
]


def serve(handle: EngineHandle, path: str) -> list[Completion]:
    """The requests before and after an update to `path`."""
    listener = Listener()
    handle.start(listener)

    def ends(prefix: str) -> list[Completion]:
        requests = [Request(**{f: getattr(r, f) for f in r.__slots__} | {"id": prefix + r.id}) for r in REQUESTS]
        handle.send(Submit(tuple(requests)))
        listener.until(lambda: all(request.id in listener.ended for request in requests))
        return [listener.ended[request.id] for request in requests]

    before = ends("before")
    handle.send(PrepareWeights("u", path, 7))
    listener.until(lambda: listener.weights)
    handle.send(CommitWeights("u"))
    listener.until(lambda: len(listener.weights) == 2)
    assert isinstance(listener.weights[0], Prepared)
    assert isinstance(listener.weights[1], Committed)
    handle.send(PrepareWeights("v", path + "/nowhere", 8))
    listener.until(lambda: len(listener.weights) == 3)
    assert listener.weights[2].failure.code == "weights_incomplete"
    after = ends("after")
    assert handle.close(20)
    assert {completion.weight_versions for completion in after} == {((7, 8),)}
    return before + after


def test_the_real_engine_answers_as_in_a_thread(tmp_path: Path) -> None:
    first = rigs.write_rand(tmp_path / "first")
    second = str(rigs.write_rand(tmp_path / "second", rigs.RandModel(seed=1)))
    how = EngineRecipe({"path": first, "config": CONFIG, "weight_version": 3})
    engine = ProcessEngine(how)
    loaded = load_engine(first, CONFIG, weight_version=3)
    # But for the time that it took, and what is free now.
    assert dataclasses.replace(engine.info, import_s=0.0, load_s=0.0, rest=loaded.info.rest) == loaded.info
    assert (engine.info.weight_version, engine.info.weight_digest) == (3, loaded.weights.digest)
    assert engine.info.kv_tokens == 8 * 256
    found = serve(engine, second)
    for completion, expected in zip(found, serve(ThreadEngine(loaded.engine, loaded.weights), second), strict=True):
        assert_same(completion, expected)
        assert completion.weight_versions == expected.weight_versions
    assert gone(engine.pid)


# Ways to start, and not to.


def test_what_the_child_logs_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running() as rig:
        assert (rig.engine.info.weight_digest, rig.engine.info.model.max_positions) == ("fake:0", 1024)
    lines = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert ("tests.engine.child_engines", "INFO", "loading 100%") in lines
    assert f"process {rig.engine.pid} builds the engine" in caplog.text
    assert "not wanted" not in caplog.text


def test_a_refusal_of_the_build_arrives_as_it_was_raised() -> None:
    with pytest.raises(WeightsInvalid) as caught:
        ProcessEngine(recipe("refused"))
    assert caught.value.code == "weights_invalid"
    assert caught.value.field == "model.norm.weight"
    assert caught.value.message == "model.norm.weight: expected shape [64], found [32]"


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsIncomplete, match=str(tmp_path)):
        ProcessEngine(EngineRecipe({"path": tmp_path}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (recipe("broken"), "KeyError: 'surprise'"),
        (recipe("ends"), "ended with exit code 3 before it was ready"),
        (recipe("fake", unknown=1), "unexpected keyword argument 'unknown'"),
    ],
)
def test_any_other_end_of_the_build_is_an_error_too(how: EngineRecipe, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        ProcessEngine(how)
    assert caught.value.code == "internal"
    assert not psutil.Process().children()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run behind a shell's `&`: children inherit that it ignores
    SIGINT, and Python then leaves it at that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def sleeps(thread: threading.Thread) -> bool:
    """In the kernel: a signal that comes a moment before would be seen when something else wakes the thread."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(") ")[2].startswith("S")


@pytest.mark.usefixtures("interruptible")
def test_a_signal_during_the_build_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    main = threading.main_thread()

    def interrupt() -> None:
        eventually(lambda: "hanging" in caplog.text and sleeps(main), 120)
        signal.pthread_kill(main.ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        ProcessEngine(recipe("hangs"))
    assert not psutil.Process().children()


def test_the_workers_signals_do_not_end_it_while_its_interpreter_starts() -> None:
    def signal_it() -> None:
        eventually(lambda: psutil.Process().children() != [], 60)
        for number in (signal.SIGINT, signal.SIGTERM):
            psutil.Process().children()[0].send_signal(number)

    sender = threading.Thread(target=signal_it)
    sender.start()
    with running() as rig:
        sender.join()
        rig.submit(ask("a"))
        assert rig.wait("a")["a"].error is None


def test_one_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = threading.active_count()
    with pytest.raises(FileNotFoundError):
        ProcessEngine(recipe("fake"))
    assert threading.active_count() == before


def test_it_may_be_made_by_a_thread_that_ends() -> None:
    made: list[ProcessEngine] = []
    maker = threading.Thread(target=lambda: made.append(ProcessEngine(recipe("fake"))))
    maker.start()
    maker.join()
    listener = Listener()
    made[0].start(listener)
    made[0].send(Submit((ask("a"),)))
    listener.until(lambda: "a" in listener.ended)
    assert listener.ended["a"].error is None
    assert made[0].close(10)


# Work.


def test_commands_arrive_in_order_and_reports_come_once_a_step() -> None:
    requests = [ask(f"{i}", 10 + i, 5 + 3 * i) for i in range(12)]
    with running() as rig:
        for request in requests:
            rig.submit(request)
        rig.submit(ask("refused", []), ask("mapped", params=SamplingParams(logit_bias=MappingProxyType({5: 1.0}))))
        ended = rig.wait(*(request.id for request in requests), "refused", "mapped")
        for request in requests:
            assert_same(ended[request.id], solo(request))
        assert ended["refused"].error is not None
        assert ended["refused"].error.field == "token_ids"
        assert len([r for r in rig.listener.reports if r.completions]) <= rig.last.stats.steps_total
        assert len(rig.listener.threads) == 1
        for array in (ended["0"].token_ids, ended["0"].logprobs["processed"]):
            array[0] = 0
        rig.engine.send(Pause())
        rig.submit(ask("b", 20, 900), ask("c", 20, 3))
        rig.engine.send(Abort(("b",), "turn_deadline"))
        assert rig.wait("b")["b"].finish_reason == "turn_deadline"
        rig.engine.send(Resume())
        assert rig.wait("c")["c"].finish_reason == "length"


def test_a_slow_listener_holds_up_no_step(tmp_path: Path) -> None:
    entered, go, trace = threading.Event(), threading.Event(), tmp_path / "steps"

    def slow(_: Report) -> None:
        entered.set()
        assert go.wait(60)

    with running(deliver=slow, trace=trace) as rig:
        rig.submit(ask("first", 20, 1))
        assert entered.wait(20)
        # Reports that would fill the pipe many times over, and not one is taken before the last step is done.
        names = [f"{i}" for i in range(1000)]
        rig.submit(*(ask(name, 5, 1) for name in names))
        eventually(lambda: trace.stat().st_size == 1 + len(names) // 8, 60)
        assert not rig.listener.reports
        go.set()
        rig.wait("first", *names)
        assert len(rig.listener.reports) < 100, "what waited comes together"
        assert rig.last.stats.steps_total == 1 + len(names) // 8


def test_ignores_the_signals_that_are_the_workers() -> None:
    with running(step_s=0.005) as rig:
        rig.submit(ask("a", 20, 50))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            os.kill(rig.engine.pid, number)
        assert rig.wait("a")["a"].finish_reason == "length"
        rig.submit(ask("b", 20, 3))
        assert rig.wait("b")["b"].finish_reason == "length"


# Death.


def test_a_killed_process_is_noticed_at_once() -> None:
    with running(step_s=0.005) as rig:
        rig.submit(ask("ended", 20, 1))
        rig.wait("ended")
        rig.submit(*(ask(f"{i}", 20, 900) for i in range(20)))
        rig.listener.until(lambda: rig.last.stats.running == 8)
        os.kill(rig.engine.pid, signal.SIGKILL)
        start = time.monotonic()
        rig.listener.until(lambda: rig.last.died)
        assert time.monotonic() - start < 1.0
        last = rig.last
        assert last.died == Failure("engine_dead", "the engine process was killed by signal 9 (Killed)")
        assert last.stats.sampled_tokens_total > 0
        rig.submit(ask("late", 20, 5))
        rig.engine.send(Pause())
        assert rig.engine.close(5)
        assert rig.last is last, "it is its last word"


def test_an_exception_in_the_loop_comes_as_it_does_from_a_thread() -> None:
    with running(step_s=0.005) as rig:
        rig.submit(ask("a", 20, 900))
        rig.submit(ask("b", [1, 511], 5))
        rig.listener.until(lambda: rig.listener.reports and rig.last.died)
        assert rig.engine.close(5)
        assert [report.died for report in rig.listener.reports if report.died] == [
            Failure("engine_dead", "RuntimeError: the device is lost")
        ]


def test_a_command_that_cannot_be_sent_ends_it() -> None:
    with running(step_s=0.005) as rig:
        rig.submit(ask("a", 20, 900), ask("b", 20, 5, group=lambda: ""))
        rig.listener.until(lambda: rig.listener.reports and rig.last.died)


def test_death_before_start_is_told_at_start() -> None:
    engine, listener = ProcessEngine(recipe("fake")), Listener()
    os.kill(engine.pid, signal.SIGKILL)
    eventually(lambda: gone(engine.pid), 5)
    engine.start(listener)
    listener.until(lambda: listener.reports)
    assert listener.reports[0].died is not None
    assert engine.close(5)


PARENT = """
import sys, time
from engine.handles.process import ProcessEngine
from tests.engine.child_engines import recipe
engine = ProcessEngine(recipe("fake"))
engine.start(lambda report: None)
print(engine.pid, flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "stopped"), [("time.sleep(1000)", False), ("time.sleep(1000)", True), ("sys.exit(0)", False)]
)
def test_it_does_not_outlive_its_parent(then: str, stopped: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(then=then)], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if stopped:
        # As one that hangs in a device call: it sees no end of the pipe.
        os.kill(pid, signal.SIGSTOP)
    if "sleep" in then:
        parent.kill()
    parent.wait(20)
    eventually(lambda: gone(pid), 2)
    parent.stdout.close()


# The end.


def test_close_drops_what_runs_and_is_final() -> None:
    with running(step_s=0.005) as rig:
        rig.submit(ask("a", 20, 900))
        assert rig.engine.close(10)
        assert rig.engine.close(10)
        assert gone(rig.engine.pid)
        assert "a" not in rig.listener.ended
        assert not any(report.died for report in rig.listener.reports)
        with pytest.raises(RuntimeError, match="closed"):
            rig.submit(ask("b"))


def test_a_process_that_does_not_stop_is_killed() -> None:
    with running() as rig:
        os.kill(rig.engine.pid, signal.SIGSTOP)
        rig.submit(*(ask(f"{i}", 1000) for i in range(1000)))
        assert not rig.engine.close(0.1)
        assert gone(rig.engine.pid)
        assert not any(report.died for report in rig.listener.reports)


def test_close_before_start_and_start_once() -> None:
    engine = ProcessEngine(recipe("fake"))
    assert engine.close(10)
    assert gone(engine.pid)
    with running() as rig, pytest.raises(RuntimeError, match="started before"):
        rig.engine.start(rig.listener)


def test_nothing_is_left_behind() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def threads() -> int:
        return threading.active_count()

    with running():
        pass
    before = files(), threads(), len(psutil.Process().children())
    for _ in range(3):
        with running() as rig:
            rig.submit(ask("a"))
            rig.wait("a")
    assert (files(), threads(), len(psutil.Process().children())) == before


def thousand(handle: EngineHandle, name: str) -> tuple[float, int]:
    """Seconds for as many small requests, sent one by one, and steps; a first thousand warms up."""
    listener = Listener()
    handle.start(listener)
    for count in (1000, 2000):
        start, steps = time.perf_counter(), listener.reports[-1].stats.steps_total if listener.reports else 0
        for i in range(1000):
            handle.send(Submit((ask(f"{name}{count}.{i}", 8, 4),)))
        listener.until(lambda count=count: sum(len(report.completions) for report in listener.reports) == count)
    seconds = time.perf_counter() - start
    assert len(listener.ended) == 2000
    assert handle.close(20)
    return seconds, listener.reports[-1].stats.steps_total - steps


@pytest.mark.stress
def test_overhead_of_a_thousand_small_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rigs.write_rand(tmp_path / "m")
    config = EngineConfig(max_running=64, max_step_tokens=512, max_context=64)
    loaded = load_engine(path, config)
    seconds, steps = thousand(ThreadEngine(loaded.engine, loaded.weights), "thread")
    apart, apart_steps = thousand(ProcessEngine(EngineRecipe({"path": path, "config": config})), "process")
    with capsys.disabled():
        print(f"\n1,000 requests of 8 + 4 tokens: {seconds:.3f} s ({steps} steps) in a thread,", end=" ")
        print(f"{apart:.3f} s ({apart_steps} steps) in a process of their own")
