"""What a worker keeps does not grow: not of rounds, not of nonsense, and nothing is left to the garbage collector.

A worker's collector is rarely called: what only it can free adds up to gigabytes, and to long pauses.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from protocols.errors import BadRequest
from protocols.fields import Record
from rollout.chat.aside import Aside
from rollout.client import RolloutClient
from rollout.environments.calls import Call, Raised
from rollout.environments.line import NOBODY
from rollout.metrics.gauges import Gauges
from rollout.metrics.health import Health
from rollout.metrics.observer import Observer, Round
from rollout.metrics.places import Places
from rollout.metrics.prometheus import Latest
from rollout.metrics.watch import Metrics
from rollout.service.service import Timeouts
from tests.rigs import RandModel, write_rand
from tests.rollout.nonsense import talk_nonsense
from tests.rollout.real_worker import real_worker
from tests.rollout.workers import ROOT, WorkerThread, eventually, worker

OURS = ("rollout", "protocols", "engine")


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
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def ours(found: list[object]) -> Counter[str]:
    """Our objects among them by type, our frames by function."""
    count = Counter[str]()
    for one in found:
        if type(one) is FrameType:
            file = Path(one.f_code.co_filename)
            if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in OURS:
                count[f"frame of {one.f_code.co_qualname}"] += 1
        elif str(type(one).__module__).split(".")[0] in OURS:
            count[type(one).__qualname__] += 1
    return count


def left_to_the_collector() -> Counter[str]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = ours(gc.garbage)
    gc.garbage.clear()
    return found


@pytest.mark.usefixtures("no_collector")
def test_nothing_of_a_record_is_left_once_it_is_acknowledged() -> None:
    ended = Ended()
    with worker(observer=ended) as served, RolloutClient(served.address) as client:
        group = client.group(np.ones(64, np.int32), n=64, max_tokens=64, trajectory_deadline_s=60.0)
        assert len(list(client.submit([group]))) == 64
        eventually(lambda: served.call(lambda service: service.runs.results) == 0)
        assert len(ended.arrays) == 4 * 64
        assert ended.kept == 0


@pytest.mark.usefixtures("no_collector")
def test_a_round_leaves_nothing_to_the_collector_at_either_end() -> None:
    with worker() as served, RolloutClient(served.address) as client:
        for _ in range(2):  # the first one builds validators, which are full of cycles
            gc.collect()
            groups = [client.group(np.ones(64, np.int32), n=8, max_tokens=64) for _ in range(4)]
            assert len(list(client.submit(groups))) == 32
            eventually(lambda: served.call(lambda service: len(service.sessions.all[0].batches)) == 0)
        assert left_to_the_collector() == {}


@pytest.mark.usefixtures("no_collector")
def test_nonsense_leaves_nothing(tmp_path: Path) -> None:
    """Over hundreds of connections: nothing to the collector, and nothing that lives on."""
    timeouts = Timeouts(client=0.2, drain=1.0, ack=1.0)
    places = Places(Health(), Latest(dict), rows=())
    metrics = Metrics(places, Gauges((), 0), interval=1.0)
    checkpoint = write_rand(tmp_path / "checkpoint", RandModel())
    with real_worker(checkpoint, timeouts=timeouts, observer=metrics) as served:
        lives: list[Counter[str]] = []
        for _ in range(2):  # what is made once is made in the first
            rounds = itertools.count()
            said = talk_nonsense(served.address, lambda rounds=rounds: next(rounds) > 1500, longest=20, pause=0.0)
            assert said["connections"] > 50
            eventually(lambda: at_rest(served), 60.0)
            assert left_to_the_collector() == {}
            lives.append(ours(gc.get_objects()))
        more = lives[1] - lives[0]
        del more["Kind"], more["Growths"]  # of which so many are remembered: see KINDS
        assert more == {}


def at_rest(served: WorkerThread) -> bool:
    return bool(served.call(lambda service: len(service.sessions) == 0 and service.runs.idle.is_set()))


@pytest.mark.usefixtures("no_collector")
def test_calls_that_raise_or_are_given_up_leave_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(raise_everywhere())
    left_to_the_collector()  # what the first time builds
    loop.run_until_complete(raise_everywhere())
    assert left_to_the_collector() == {}
    loop.close()


async def raise_everywhere() -> None:
    """On the loop, on a thread, beside the loop, and on a thread that is interrupted."""

    def on_thread() -> None:
        raise BadRequest("no")

    async def on_loop() -> None:
        raise BadRequest("no")

    for method in (on_thread, on_loop):
        call = Call(method)
        await asyncio.wait({call.task})
        assert isinstance(call.task.result(), Raised)
        del call
    call = Call(lambda: None)
    await asyncio.sleep(0)
    for thread in threads():
        thread.join()
    call.interrupt()  # which comes when it has ended, and nobody knows yet
    await asyncio.wait({call.task})
    assert isinstance(call.task.result(), Raised)
    del call
    aside = Aside()
    with pytest.raises(BadRequest):
        await aside.run(NOBODY, on_thread)
    began = threading.Event()

    def endless() -> None:
        began.set()
        while True:
            time.sleep(0.001)

    task = asyncio.get_running_loop().create_task(aside.run(NOBODY, endless))
    await asyncio.to_thread(began.wait)
    left = threads()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await asyncio.to_thread(lambda: [thread.join() for thread in left])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "environment"]
