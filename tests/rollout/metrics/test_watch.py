"""The whole on a worker: rows of rounds and gauges, health while it runs, and faults that cost no trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.handle import Submit
from protocols.fields import Times
from rollout.metrics.feed import Feed
from rollout.metrics.gauges import Gauges
from rollout.metrics.health import Health
from rollout.metrics.places import Places
from rollout.metrics.prometheus import Latest
from rollout.metrics.row import ROUND_AXIS, TIME_AXIS, Row
from rollout.metrics.watch import Metrics
from tests.rollout.metrics.records import ROUND, record
from tests.rollout.raw_client import RawClient, group
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.workers import WorkerThread, eventually, worker


class Kept:
    """A place that keeps what it gets; it waits for `gate` before."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()

    def write(self, item: Any) -> None:
        assert self.gate.wait(20)
        self.items.append(item)

    def close(self) -> None: ...

    def abandon(self) -> None:
        self.gate.set()

    def rows(self, kind: str) -> list[Row]:
        return [row for row in self.items if row.kind == kind]


class Watched:
    """A worker over a timed engine, with metrics whose places are in memory."""

    def __init__(self, interval: float, patience: float, *, self_check: bool = False) -> None:
        self.place, self.lines = Kept(), Kept()
        self.health = Health(patience)
        feeds: tuple[Feed[Row], ...] = (Feed("a place", lambda: self.place),)
        self.places = Places(self.health, Latest(dict), feeds, Feed("the line", lambda: self.lines, newest=True))
        self.metrics = Metrics(self.places, Gauges((), 0), interval=interval, self_check=self_check)
        self.worker: WorkerThread
        self._task: asyncio.Task[None]

    def watch(self, thread: WorkerThread) -> None:
        self.worker = thread
        thread.call(self._begin)

    def _begin(self, service: Any) -> None:
        self._task = asyncio.get_running_loop().create_task(self.metrics.watch(service))

    def end(self) -> None:
        """The watch ends; its last look is taken."""

        async def end() -> None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

        asyncio.run_coroutine_threadsafe(end(), self.worker.loop).result(10)

    def alive(self) -> bool:
        return self.health.alive(time.monotonic()).good

    def ready(self) -> bool:
        return self.health.ready(time.monotonic()).good


@contextmanager
def watched(
    engine: TimedEngine | None = None, *, interval: float = 0.05, patience: float = 30.0
) -> Iterator[tuple[Watched, RawClient]]:
    made = Watched(interval, patience)
    with worker(engine or TimedEngine(0.001), observer=made.metrics) as thread, RawClient(thread.address) as client:
        client.hello()
        made.watch(thread)
        yield made, client
    made.places.close(20)


def submit(client: RawClient, batch: str, *groups: dict[str, Any], **fields: Any) -> None:
    assert client.call("submit", batch_id=batch, groups=list(groups), **fields)["type"] == "accepted"


def test_each_batch_is_a_row_and_the_gauges_go_on_beside() -> None:
    with watched() as (watch, client):
        for step in (7, 8):
            submit(client, f"b{step}", group(f"g{step}", n=4, max_tokens=5), step=step)
            client.event("batch_done")
        eventually(lambda: len(watch.place.rows("gauges")) > 2)
    rounds = watch.place.rows("round")
    assert [row.values[ROUND_AXIS] for row in rounds] == [7, 8]
    assert all(row.values["rollout/response_len/mean"] == 5 for row in rounds)
    axis = [row.values[TIME_AXIS] for row in watch.place.rows("gauges")]
    assert axis == sorted(axis)
    assert abs(axis[-1] - time.time()) < 60


def test_the_times_of_a_round_sum_to_its_trajectories_wall_time() -> None:
    with watched() as (watch, client):
        submit(client, "b", group("g", n=3, max_tokens=20), step=1)
        walls = [client.record()["wall_s"] for _ in range(3)]
        client.event("batch_done")
    (row,) = watch.place.rows("round")
    parts = [value for name, value in row.values.items() if name.startswith("rollout/time/") and name.endswith("mean")]
    assert len(parts) == 6
    assert math.fsum(parts) == pytest.approx(math.fsum(walls) / 3, rel=1e-6)


def test_a_late_round_says_which_one_it_is() -> None:
    with watched(TimedEngine(0.01)) as (watch, client):
        submit(client, "slow", group("slow", n=1, max_tokens=60), step=1)
        submit(client, "fast", group("fast", n=1, max_tokens=2), step=2)
        for _ in range(2):
            client.event("batch_done")
    assert [row.values[ROUND_AXIS] for row in watch.place.rows("round")] == [2, 1]


def test_weights_show_in_the_gauges() -> None:
    with watched(TimedEngine(prepare_s=0.01)) as (watch, client):
        client.call("prepare_weights", update_id="u", path="/w", version=3)
        client.call("commit_weights", update_id="u", version=3, mode="abort")
        client.call("prepare_weights", update_id="v", path="/bad", version=4)
        watch.end()
    last = watch.place.rows("gauges")[-1].values
    assert (last["weights/version"], last["weights/load_s"], last["weights/bytes"]) == (3, 0.01, 1000)
    assert (last["weights/paused_s"], last["weights/failures"]) == (0.001, 1)


def test_the_end_is_one_more_look() -> None:
    with watched(interval=1000.0) as (watch, client):
        eventually(lambda: len(watch.place.rows("gauges")) == 1)
        submit(client, "b", group("g", n=1, max_tokens=2))
        client.event("batch_done")
        watch.end()
        eventually(lambda: len(watch.place.rows("gauges")) == 2)
    first, last = watch.place.rows("gauges")
    assert last.values["wire/rx_bytes"] > first.values["wire/rx_bytes"]


def test_the_line_says_how_far_the_round_is() -> None:
    with watched(TimedEngine(0.005)) as (watch, client):
        submit(client, "b", group("g", n=2, max_tokens=100), step=33)
        eventually(lambda: any("step 33: 0/2 trajectories" in line for line in watch.lines.items))
        client.event("batch_done")


def test_an_idle_worker_is_healthy_and_ready_and_one_whose_engine_is_silent_is_not() -> None:
    engine = TimedEngine()
    with watched(engine, patience=0.5) as (watch, _):
        eventually(lambda: watch.alive() and watch.ready())
        engine.seen.clear()
        answers = engine._take
        engine._take = lambda command: answers(command) if isinstance(command, Submit) else None  # type: ignore[method-assign]
        eventually(lambda: not watch.alive())
        assert "has not answered" in watch.health.alive(time.monotonic()).why
        engine._take = answers  # type: ignore[method-assign]
        eventually(watch.alive)


def test_work_without_steps_is_not_healthy() -> None:
    with watched(TimedEngine(10.0), patience=0.3) as (watch, client):
        submit(client, "b", group("g", n=1, max_tokens=100))
        eventually(lambda: "made no step" in watch.health.alive(time.monotonic()).why)
        client.call("cancel", batch_ids=["b"])
        client.event("batch_done")
        eventually(watch.alive)


def test_a_paused_worker_is_alive_and_takes_no_work() -> None:
    with watched() as (watch, client):
        eventually(watch.ready)
        client.call("pause")
        eventually(lambda: watch.health.ready(time.monotonic()).why == "paused")
        assert watch.alive()
        client.call("resume")
        eventually(watch.ready)


def test_a_dead_engine_is_seen() -> None:
    engine = TimedEngine(1.0)
    with watched(engine, interval=0.01) as (watch, client):
        eventually(watch.alive)
        submit(client, "b", group("g", n=1, max_tokens=100))
        engine.die()
        eventually(lambda: watch.health.alive(time.monotonic()).why == "the engine died")


def test_a_place_that_hangs_delays_no_trajectory() -> None:
    with watched() as (watch, client):
        watch.place.gate.clear()
        for step in range(5):
            submit(client, f"b{step}", group(f"g{step}", n=8, max_tokens=3), step=step)
            assert client.event("batch_done")["counts"] == {"truncated": 8}
        watch.place.gate.set()
    assert len(watch.place.rows("round")) == 5


def test_a_fault_in_counting_costs_a_number_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    with watched() as (watch, client):
        monkeypatch.setattr("rollout.metrics.rounds.Rounds.add", broken)
        submit(client, "b", group("g", n=8, max_tokens=3))
        assert client.event("batch_done")["counts"] == {"truncated": 8}
        eventually(lambda: len(watch.place.rows("gauges")) > 2)
    assert not watch.place.rows("round")
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert [one.getMessage() for one in errors] == [
        "counting failed in trajectory_ended, and goes on with what comes next"
    ]


def test_numbers_that_are_not_finite_raise_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watched(1.0, 1.0)
    endless = record().model_copy(update={"times": Times.model_construct(queue=math.inf, decode=math.nan)})
    watch.metrics.batch_accepted(ROUND, 1)
    watch.metrics.trajectory_ended(ROUND, endless, 0)
    watch.metrics.batch_done(ROUND)
    watch.places.close(20)
    (row,) = watch.place.rows("round")
    assert math.isnan(row.values["rollout/time/decode_s/mean"])
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
