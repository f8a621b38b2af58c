"""The wire alone, over an engine that answers at once: 1,024 trajectories of 8,192 tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from bench.wire import ARRAY_BYTES, fetch
from protocols.fields import Record
from rollout.client import RolloutClient
from rollout.metrics.observer import Observer, Round
from tests.rollout.wire_client import memory
from tests.rollout.workers import WorkerProcess, eventually
from tests.rollout.workers import worker as worker_thread


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    process = WorkerProcess("tests.rollout.stub_worker", folder=tmp_path)
    try:
        yield process.wait_ready()
    finally:
        process.kill()


def test_1024_trajectories_of_8192_tokens_come_whole_and_cost_little(worker: WorkerProcess) -> None:
    process = psutil.Process(worker.process.pid)
    idle, before = memory(process.pid, "VmRSS"), process.cpu_times()
    client = fetch(worker)
    after = process.cpu_times()
    assert memory(process.pid, "VmHWM") - idle < 3 * ARRAY_BYTES
    assert client["growth"] < 3 * ARRAY_BYTES
    # A guard for a machine that does other things too: the seconds are stress's to measure.
    assert after.user + after.system - before.user - before.system < 4
    assert client["cpu"] < 4


class Ended(Observer):
    """Remembers records without keeping them."""

    def __init__(self) -> None:
        self.arrays: list[weakref.ref[np.ndarray]] = []

    def trajectory_ended(self, batch: Round, record: Record, version: int) -> None:  # noqa: ARG002
        segment = record.segments[0]
        for array in (segment.token_ids, segment.source, segment.logprobs, segment.loss_mask):
            self.arrays.append(weakref.ref(array))

    @property
    def kept(self) -> int:
        return sum(array() is not None for array in self.arrays)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """A worker's collector is rarely called: what only it can free adds up to gigabytes, and to long pauses."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_nothing_of_a_record_is_left_once_it_is_acknowledged() -> None:
    ended = Ended()
    with worker_thread(observer=ended) as served, RolloutClient(served.address) as client:
        group = client.group(np.ones(64, np.int32), n=64, max_tokens=64, trajectory_deadline_s=60.0)
        assert len(list(client.submit([group]))) == 64
        eventually(lambda: served.call(lambda service: service.runs.results) == 0)
        assert len(ended.arrays) == 4 * 64
        assert ended.kept == 0


@pytest.mark.usefixtures("no_collector")
def test_a_round_leaves_nothing_to_the_collector_at_either_end() -> None:
    with worker_thread() as served, RolloutClient(served.address) as client:
        for _ in range(2):  # the first one builds validators, which are full of cycles
            gc.set_debug(0)
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            groups = [client.group(np.ones(64, np.int32), n=8, max_tokens=64) for _ in range(4)]
            assert len(list(client.submit(groups))) == 32
            eventually(lambda: served.call(lambda service: len(service.sessions.all[0].batches)) == 0)
        gc.collect()
        ours = {type(one) for one in gc.garbage if type(one).__module__.startswith(("rollout", "protocols", "engine"))}
        assert ours == set()


@pytest.mark.stress
def test_1024_trajectories_of_8192_tokens_take_less_than_2_seconds(worker: WorkerProcess) -> None:
    assert min(fetch(worker)["seconds"] for _ in range(3)) < 2


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_memory_does_not_grow_from_round_to_round(worker: WorkerProcess) -> None:
    fetch(worker)
    after_one = memory(worker.process.pid, "VmRSS")
    for _ in range(10):
        fetch(worker)
    # How much waits for the client differs between rounds; ten rounds kept would be ten times this.
    assert memory(worker.process.pid, "VmRSS") - after_one < ARRAY_BYTES
