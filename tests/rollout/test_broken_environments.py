"""Environments in processes that break at random, under a whole worker: as many records, each with the right status.

Each of at most PROCESSES trajectories at once has a process of its own, so that a death costs the culprit alone. Only
where a `close` takes longer than its record waits for it does the next trajectory share a process.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.handles.thread import ThreadEngine
from protocols.fields import Failure, ModelInfo
from rollout.client import RolloutClient, Trajectory
from rollout.environments.registry import Registry
from rollout.service.service import Served
from tests.fake_runner import FakeRunner, FakeWeights
from tests.rollout.environments.odd import Odd
from tests.rollout.workers import WorkerThread, eventually, worker

PROCESSES = 8
DEADLINE_S = 1.0
RAISED = ("raise", "exit", "interrupt", "kill", "os._exit", "own class")
ENDLESS = ("hang", "burn", "print")
NONSENSE = ("none", "nan", "20 MB", "bad id")
PLANS = [
    *(("reset", what) for what in (*RAISED, *ENDLESS)),
    *(("step", what) for what in (*RAISED, *ENDLESS, *NONSENSE, "2 MB")),
    *(("finish", what) for what in (*RAISED, "nan")),
    *(("close", what) for what in ("raise", "exit", "kill")),
    *((None, None) for _ in range(8)),
]


def expected(stage: str | None, what: str | None) -> tuple[str, str]:
    if stage in (None, "close"):
        return "completed", "env_done"
    if stage == "step" and what in ENDLESS:
        return "truncated", "tool_deadline"
    if stage == "step" and what == "2 MB":
        return "truncated", "context_overflow"
    return "failed", "env_error"


def check(trajectory: Trajectory, plan: tuple[str | None, str | None]) -> bool:
    """False where a machine under load made a healthy call miss its deadline, or cost a neighbour its process."""
    stage, what = plan
    failure = trajectory.error
    found = (trajectory.status, trajectory.finish_reason)
    late = found[1] == "tool_deadline" or (failure is not None and failure.code == "timeout")
    wrong_stage = failure is not None and failure.stage != stage
    if found != expected(stage, what) or wrong_stage or late != (what in ENDLESS):
        assert late or shared(failure), (plan, found, failure)
        return False
    assert trajectory.loss_mask.any() == (trajectory.status != "failed")
    if trajectory.status == "completed":
        assert trajectory.reward == 3.0
    assert failure is None or failure.message
    return True


def shared(failure: Failure | None) -> bool:
    """Did another one's end take its process?"""
    return failure is not None and failure.message.startswith("process of environments")


def play(client: RolloutClient, count: int, seed: int) -> Counter[str]:
    choice = random.Random(seed)
    plans = {f"{seed}-{i}": choice.choice(PLANS) for i in range(count)}
    groups = [
        client.group(
            [5, 6, 7],
            id=name,
            max_tokens=4,
            environment="odd",
            metadata={"stage": stage, "what": what, "turn": choice.randrange(3)},
            tool_deadline_s=DEADLINE_S,
        )
        for name, (stage, what) in plans.items()
    ]
    seen: Counter[str] = Counter()
    late = 0
    for trajectory in client.submit(groups):
        seen[trajectory.status] += 1
        late += not check(trajectory, plans[trajectory.group_id])
    assert sum(seen.values()) == count
    assert late <= count // 10, f"{late} calls of healthy environments were late"
    return seen


@contextmanager
def odd_worker() -> Iterator[tuple[WorkerThread, FakeRunner]]:
    runner = FakeRunner(num_blocks=64)
    engine = Engine(runner, EngineConfig(max_running=PROCESSES, max_context=1024))
    runner.watch(engine._scheduler.pool)
    model = ModelInfo(architecture="fake", dtype="float32", vocab_size=runner.vocab_size, max_context=1024)
    registry = Registry({"odd": Odd}, processes=2 * PROCESSES)
    handle: Any = ThreadEngine(engine, FakeWeights(runner))
    with worker(handle, what=Served(model, 0, "fake:0", registry), at_once=PROCESSES) as served:
        yield served, runner


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def healthy(served: WorkerThread) -> None:
    """Idle, and nothing is held by the engine or the worker."""
    runs, engine = served.service.runs, served.service.engine
    eventually(lambda: runs.results == 0 and runs.idle.is_set())
    eventually(lambda: not (engine.stats.running or engine.stats.waiting or engine.stats.blocks_used))
    assert runs.admission.reserved_bytes == 0
    assert engine.died is None


def test_sixty_break_at_random(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    threads = threading.active_count()
    with odd_worker() as (served, _), RolloutClient(served.address) as client:
        began = time.monotonic()
        seen = play(client, 60, seed=1)
        assert time.monotonic() - began < 90
        assert set(seen) == {"completed", "truncated", "failed"}
        healthy(served)
        told = client.status().environments
        assert 0 < told["processes"] <= PROCESSES
        assert told["process_deaths_total"] > 0
    eventually(lambda: not descendants())
    eventually(lambda: threading.active_count() <= threads)


@pytest.mark.stress
def test_a_thousand_break_at_random_five_times_and_memory_stays_flat(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    used: list[int] = []
    objects: list[int] = []
    descriptors: list[int] = []
    with odd_worker() as (served, runner), RolloutClient(served.address) as client:
        for repeat in range(5):
            began = time.monotonic()
            seen = play(client, 1000, seed=repeat)
            took = time.monotonic() - began
            healthy(served)
            assert took < 400
            # Each process is two; and the one that they come from.
            eventually(lambda: len(descendants()) <= 2 * PROCESSES + 1)
            # What the fake device remembers of its steps is not the worker's.
            runner.plans.clear()
            runner.events.clear()
            gc.collect()
            objects.append(len(gc.get_objects()))
            # Of what is kept for each trajectory there would be 1,000 more; the last batch may still be on its way out.
            eventually(lambda: len(gc.get_objects()) < objects[0] + 900)
            used.append(psutil.Process().memory_info().rss)
            descriptors.append(len(list(Path(f"/proc/{os.getpid()}/fd").iterdir())))
            told = f"{took:.0f} s, {dict(seen)}, {used[-1] / 1e6:.0f} MB, {objects[-1]} objects"
            print(f"{repeat}: {told}, {descriptors[-1]} descriptors")
    assert max(used[2:]) - used[1] < 10e6, used
    assert max(descriptors[2:]) - descriptors[1] < 4 * PROCESSES, descriptors
    eventually(lambda: not descendants())
