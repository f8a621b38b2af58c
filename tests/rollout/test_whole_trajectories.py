"""Whole trajectories through a worker over a real engine loop: where their time went, and what was computed again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from engine.config import BLOCK_SIZE, EngineConfig
from engine.engine import Engine
from engine.handles.thread import ThreadEngine
from engine.step import StepPlan
from protocols.fields import Status
from rollout.batches.admission import kv_candidate, kv_key
from rollout.environments.base import Context, Environment, Step, TurnResult
from rollout.generation.kv_budget import KvBudget
from tests.fake_runner import FakeRunner, FakeTicket, FakeWeights
from tests.rollout.batches.test_admission import Queue
from tests.rollout.raw_client import RawClient, group
from tests.rollout.workers import WorkerThread, eventually, served, worker

TURNS = 4


class Slow(Environment):
    """Takes `wait` seconds for each answer: `seen` tokens."""

    async def reset(self, context: Context) -> None:
        self._config = context.config
        self._chance = np.random.default_rng(context.sample_index)

    async def step(self, turn: TurnResult) -> Step:
        await asyncio.sleep(self._config["wait"])
        if turn.index + 1 == TURNS:
            return Step(done=True)
        return Step(observation=self._chance.integers(1, 500, self._config["seen"], np.int32))


class Together(Environment):
    """Answers when all `config["all"]` of them have come, as one does that steps a batch of games at once."""

    come: ClassVar[list[asyncio.Future[None]]] = []

    async def reset(self, context: Context) -> None:
        self._all = context.config["all"]

    async def step(self, turn: TurnResult) -> Step:
        here = asyncio.get_running_loop().create_future()
        self.come.append(here)
        if len(self.come) == self._all:
            while self.come:
                self.come.pop().set_result(None)
        await here
        return Step(observation=[1] * 20, done=turn.index + 1 == TURNS)


class Paced(FakeRunner):
    """A step takes a millisecond at least, as on a device."""

    def launch(self, plan: StepPlan) -> FakeTicket:
        time.sleep(0.001)
        return super().launch(plan)


@contextmanager
def real_worker(num_blocks: int, *, whole: bool, slots: int = 4) -> Iterator[tuple[WorkerThread, Engine]]:
    runner = Paced(num_blocks=num_blocks, num_slots=slots, vocab_size=1000)
    engine = Engine(runner, EngineConfig(max_running=slots, max_step_tokens=64, max_context=600))
    runner.watch(engine._scheduler.pool)
    here = "tests.rollout.test_whole_trajectories"
    what = served(max_context=600, env=(f"slow={here}:Slow", f"together={here}:Together"))
    what = replace(what, kv_tokens=(num_blocks - 1) * BLOCK_SIZE if whole else None)
    handle: Any = ThreadEngine(engine, FakeWeights(runner))
    with worker(handle, what=what) as thread:
        yield thread, engine


def agents(name: str, *, n: int, wait: float, prompt: int = 40, max_tokens: int = 24, seen: int = 20) -> dict[str, Any]:
    ids = np.random.default_rng(list(name.encode())).integers(1, 500, prompt)
    environment = {"name": "slow", "config": {"wait": wait, "seen": seen}}
    return group(
        name, n=n, prompt=ids, max_tokens=max_tokens, environment=environment, budget={"on_length": "continue"}
    )


def records(client: RawClient, count: int) -> list[dict[str, Any]]:
    found = [client.record(30.0) for _ in range(count)]
    assert {record["status"] for record in found} == {"completed"}, found
    return found


# Time.


def test_the_times_of_a_trajectory_sum_to_its_wall_time_whatever_it_went_through() -> None:
    with real_worker(20, whole=False) as (thread, engine), RawClient(thread.address) as client:
        client.hello()
        start = time.monotonic()
        assert (
            client.call("submit", batch_id="b", groups=[agents(f"g{i}", n=3, wait=0.03) for i in range(3)])["type"]
            == "accepted"
        )
        eventually(lambda: thread.service.engine.stats.preemptions_total > 0)
        client.call("pause")
        eventually(lambda: engine.paused)
        paused = time.monotonic()
        while time.monotonic() < paused + 0.1:
            client.call("ping")
        client.call("resume")
        assert client.call("prepare_weights", update_id="u", path="7", version=1)["type"] == "weights_prepared"
        committed = client.call("commit_weights", update_id="u", version=1, drain_timeout_s=20.0, timeout=30.0)
        assert committed["type"] == "weights_committed"
        found = records(client, 9)
        elapsed = time.monotonic() - start
    for record in found:
        times, turns = record["times"], record["segments"][0]["turns"]
        assert sum(times.values()) == pytest.approx(record["wall_s"], rel=0.01)
        assert record["wall_s"] <= elapsed
        assert all(seconds >= 0 for seconds in times.values())
        assert len(turns) == TURNS
        assert TURNS * 0.03 <= times["tool_wait"] < TURNS * 0.03 + 0.4
        for part in ("prefill", "decode", "preempted", "paused"):
            assert sum(turn["times"][part] for turn in turns) == pytest.approx(times[part], abs=1e-6)
        assert all(turn["times"]["tool_wait"] >= 0.03 for turn in turns)
        assert times["decode"] >= TURNS * 20 * 0.001, "each token takes a step"
    assert any(record["times"]["preempted"] > 0 for record in found)
    assert sum(turn["preemptions"] for r in found for turn in r["segments"][0]["turns"]) > 0
    assert max(record["times"]["paused"] for record in found) >= 0.09
    assert {tuple(run) for r in found for run in r["segments"][0]["weight_versions"][:, :1].tolist()} == {(0,), (1,)}
    # The longest one was there from the submit to the end: it is the client's own time.
    assert max(record["wall_s"] for record in found) == pytest.approx(elapsed, rel=0.15)


# Tokens.


def tokens_by_turn(found: list[dict[str, Any]], name: str) -> list[int]:
    return [sum(record["segments"][0]["turns"][i][name] for record in found) for i in range(TURNS)]


def test_later_turns_compute_only_what_is_new_where_memory_allows() -> None:
    with real_worker(200, whole=True, slots=8) as (thread, engine), RawClient(thread.address) as client:
        client.hello()
        client.call("submit", batch_id="b", groups=[agents("g", n=8, wait=0.01)])
        found = records(client, 8)
        cached, computed = tokens_by_turn(found, "cached_tokens"), tokens_by_turn(found, "computed_tokens")
        prompts = tokens_by_turn(found, "prompt_len")
        assert [c + k for c, k in zip(cached, computed, strict=True)] == prompts
        # KV of the last sampled token is never there: it is computed with the next turn.
        for record in found:
            for turn in record["segments"][0]["turns"][1:]:
                assert turn["cached_tokens"] == (turn["prompt_len"] - 20 - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert thread.service.engine.stats.computed_prompt_tokens_total == sum(computed)
        eventually(lambda: engine.stats().blocks_used == 0)


def test_a_pool_for_a_few_is_left_to_a_few() -> None:
    """Twelve trajectories over a pool for three: each finds its KV again, once lengths are known."""
    found: dict[bool, int] = {}
    for whole in (True, False):
        with real_worker(40, whole=whole, slots=8) as (thread, engine), RawClient(thread.address) as client:
            client.hello()
            for batch in range(2):
                groups = [agents(f"{batch}{i}", n=1, wait=0.01) for i in range(12)]
                client.call("submit", batch_id=f"b{batch}", groups=groups)
                records_ = records(client, 12)
            found[whole] = sum(tokens_by_turn(records_, "computed_tokens"))
            eventually(lambda: engine.stats().blocks_used == 0)
            assert engine.stats().kv_holds == 0
    new = 12 * (40 + (TURNS - 1) * 20)
    partial = 12 * (TURNS - 1) * BLOCK_SIZE
    assert found[True] <= new + partial + 0.03 * new
    assert found[False] > found[True]


def test_trajectories_that_wait_for_each_other_all_come_to_their_ends() -> None:
    """Twelve over a pool for three: with some of them away nobody would ever come back to make room."""
    with real_worker(40, whole=True) as (thread, engine), RawClient(thread.address) as client:
        client.hello()
        environment = {"name": "together", "config": {"all": 12}}
        groups = [agents(f"g{i}", n=1, wait=0.0) | {"environment": environment} for i in range(12)]
        client.call("submit", batch_id="b", groups=groups)
        assert len(records(client, 12)) == 12
        eventually(lambda: engine.stats().blocks_used == 0)


def test_a_client_that_goes_leaves_no_kv_behind() -> None:
    with real_worker(100, whole=True) as (thread, engine), RawClient(thread.address) as client:
        client.hello()
        client.call("submit", batch_id="b", groups=[agents("g", n=4, wait=5.0)])
        eventually(lambda: engine.stats().kv_holds == 4)
        client.call("cancel", batch_ids=["b"])
        eventually(lambda: engine.stats().blocks_used == 0)
        assert thread.call(lambda service: len(service.runs.admission._kv._running)) == 0


def test_a_commit_does_not_wait_for_trajectories_between_turns_and_takes_their_kv() -> None:
    with real_worker(100, whole=True) as (thread, engine), RawClient(thread.address) as client:
        client.hello()
        client.call("submit", batch_id="b", groups=[agents("g", n=4, wait=1.0)])
        eventually(lambda: engine.stats().kv_holds == 4)
        client.call("prepare_weights", update_id="u", path="7", version=1)
        start = time.monotonic()
        client.call("commit_weights", update_id="u", version=1, drain_timeout_s=20.0)
        assert time.monotonic() - start < 0.7
        assert engine.stats().kv_holds == 0
        client.call("cancel", batch_ids=["b"])


# Admission.


def test_a_member_starts_where_its_kv_fits_and_its_end_is_learned_from() -> None:
    budget = KvBudget(10 * BLOCK_SIZE)
    queue = Queue()
    queue.admission._kv, queue.admission._max_context = budget, 600
    members = [queue.add(prompt=48, id=f"g{i}") for i in range(4)]
    assert queue.start() == members[:2]
    assert queue.start() == []
    first = members[0]
    assert kv_key(first) in budget
    budget.grew(kv_key(first), 64)
    first.record = type("Record", (), {"status": "completed"})()  # type: ignore[assignment]
    queue.admission.ended(first, 0)
    assert kv_key(first) not in budget
    assert budget._kinds[kv_candidate(first, 600).kind].ended.largest == 16
    assert queue.start() == [members[2]]


@pytest.mark.parametrize(
    ("status", "tells"), [("completed", True), ("truncated", True), ("aborted", False), ("failed", False)]
)
def test_only_those_that_ended_by_themselves_tell_how_long_others_will_be(status: Status, tells: bool) -> None:
    budget = KvBudget(100 * BLOCK_SIZE)
    queue = Queue()
    queue.admission._kv, queue.admission._max_context = budget, 600
    member = queue.add(prompt=48)
    queue.start()
    budget.grew(kv_key(member), 100)
    member.record = type("Record", (), {"status": status})()  # type: ignore[assignment]
    queue.admission.ended(member, 0)
    kind = budget._kinds[kv_candidate(member, 600).kind]
    assert (kind.ended.largest == 52) == tells
