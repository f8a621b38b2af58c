"""`AsyncRollouts`: samples, threads, and what becomes of errors, over a worker with an engine made of a formula."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from protocols.errors import Overloaded
from rollout.client import RolloutClient, Trajectory
from rollout.integrations.trl import AsyncRollouts, Sample
from tests.rollout.integrations.trl.stubs import ByteTokenizer, arguments
from tests.rollout.integrations.trl.test_grpo import ENV
from tests.rollout.timed_engine import TimedEngine, reply_ids, reply_logprobs
from tests.rollout.workers import WorkerThread, eventually, served, worker

ROWS = [{"prompt": "abc", "answer": 1.0}, {"prompt": [{"role": "user", "content": "hello"}], "answer": 2.0}]
Make = Callable[..., AsyncRollouts]


@pytest.fixture
def running() -> Iterator[WorkerThread]:
    with worker(TimedEngine(), what=served(env=(ENV,))) as thread:
        yield thread


@pytest.fixture
def client(running: WorkerThread) -> Iterator[RolloutClient]:
    with RolloutClient(running.address, timeout=10.0, reconnect_timeout=1.0) as client:
        yield client


@pytest.fixture
def make(client: RolloutClient) -> Iterator[Make]:
    """Rollouts that are stopped at the end, with no thread left."""
    with ExitStack() as stack:

        def make(rows: Any = ROWS, *, args: dict[str, Any] | None = None, **options: Any) -> AsyncRollouts:
            rollouts = AsyncRollouts(client, arguments(**(args or {})), rows, ByteTokenizer(), **options)
            stack.callback(rollouts.stop)
            return rollouts

        yield make
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trl-rollouts")]


def by_index(trajectory: Trajectory, row: Any) -> float:
    return row["answer"] * trajectory.sample_index


def take(rollouts: AsyncRollouts, count: int) -> list[Sample]:
    return [rollouts.rollout_buffer.get(timeout=10) for _ in range(count)]


def test_a_sample_has_the_fields_of_trls() -> None:
    worker_module = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")
    theirs = [(field.name, field.default) for field in dataclasses.fields(worker_module.RolloutSample)]
    assert [(field.name, field.default) for field in dataclasses.fields(Sample)] == theirs


def test_groups_become_samples_with_trls_advantages(make: Make) -> None:
    rollouts = make(reward=by_index, script=[[7, 8]], args={"max_inflight_tasks": 4})
    rollouts.start()
    groups: dict[int, list[Sample]] = {}
    for sample in take(rollouts, 12):
        groups.setdefault(sample.group_id, []).append(sample)
    assert sorted(groups) == [0, 1, 2]  # the dataset begins again
    for number, group in groups.items():
        rewards = np.arange(4.0) * ROWS[number % 2]["answer"]
        assert [sample.metrics["reward"] for sample in group] == rewards.tolist()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        np.testing.assert_allclose([sample.advantage for sample in group], advantages)
    sample, prompt = groups[1][0], b"uhelloa"
    assert sample.input_ids.tolist()[: len(prompt) + 4] == [*prompt, *reply_ids(len(prompt), 4)]
    assert sample.completion_mask.tolist() == [0] * 7 + [1] * 4 + [0] * 2 + [1] * 4
    assert sample.old_log_probs[7:11].tolist() == reply_logprobs(4).tolist()
    assert not sample.old_log_probs[sample.completion_mask == 0].any()
    assert (sample.input_ids.dtype, sample.completion_mask.dtype) == (np.int64, np.int64)
    assert sample.old_log_probs.dtype == np.float32
    assert sample.prompt == ROWS[1]["prompt"]
    assert groups[0][0].prompt == [{"role": "user", "content": "abc"}]
    assert sample.completion[0]["content"].startswith(" ".join(map(str, reply_ids(7, 4))))
    assert sample.enqueued_at is not None
    measured = rollouts.metrics_queue.get_nowait()
    assert (measured["rollout/failed_ratio"], measured["rollout/num_turns"]) == ((0, 4), (8, 4))


def test_versions_are_trls_own(make: Make, client: RolloutClient) -> None:
    client.update_weights("/w/41", 41)
    rollouts = make(reward=by_index)
    rollouts.update_model_version(1)
    rollouts.start()
    assert {sample.model_version for sample in take(rollouts, 8)} == {1}
    client.update_weights("/w/42", 42)
    rollouts.update_model_version(2)
    while take(rollouts, 1)[0].model_version != 2:
        pass


def test_what_failed_or_has_no_reward_is_left_out_and_pulls_no_mean_down(make: Make) -> None:
    rollouts = make(environment="sometimes", args={"max_inflight_tasks": 1})
    rollouts.start()
    samples = take(rollouts, 4)
    assert [sample.group_id for sample in samples] == [0, 0, 1, 1]
    assert {(sample.advantage, sample.metrics["reward"]) for sample in samples} == {(0.0, 0.5)}
    assert rollouts.metrics_queue.get_nowait()["rollout/failed_ratio"] == (2, 4)

    def unsure(trajectory: Trajectory, row: Any) -> float | None:  # noqa: ARG001
        return (None, float("nan"), 1.0, 3.0)[trajectory.sample_index]

    rollouts = make(reward=unsure)
    rollouts.start()
    np.testing.assert_allclose(sorted(sample.advantage for sample in take(rollouts, 2)), [-1, 1])


def test_filters_are_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = make(reward=by_index, args={"top_k": 5})
    rollouts.start()
    take(rollouts, 8)
    assert caplog.text.count("top_k") == 1


def test_an_option_may_be_a_function_of_the_row(make: Make) -> None:
    rollouts = make(reward=by_index, max_tokens=lambda row: int(row["answer"]))
    rollouts.start()
    for sample in take(rollouts, 8):
        assert sample.completion_mask.sum() == ROWS[sample.group_id % 2]["answer"]


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (ROWS, {"reward": lambda _, row: row["no such column"]}, "no such column"),
        (ROWS, {"environment": "sometimes", "config": {"always": True}}, r"\d groups in a row.*odd"),
        (ROWS, {"environment": "scripted"}, "without a reward"),
        (ROWS, {"environment": "nobody has this"}, "nobody has this"),
        ([], {"reward": by_index}, "no rows"),
        (iter(ROWS), {"reward": by_index}, "no rows"),
    ],
)
def test_what_ends_the_rollouts_is_told_to_the_trainer(make: Make, rows: Any, options: Any, said: str) -> None:
    rollouts = make(rows, **options)
    rollouts.start()

    def fails() -> bool:
        try:
            rollouts.check_health(10.0)
        except RuntimeError:
            return True
        return False

    eventually(fails)
    with pytest.raises(RuntimeError, match=f"(?s){said}"):
        rollouts.check_health(10.0)
    # All threads end, not only the one that failed: a trainer that is fed would never ask.
    eventually(lambda: not any(thread.is_alive() for thread in rollouts._threads))


def test_a_worker_that_is_gone_is_told(make: Make, running: WorkerThread) -> None:
    rollouts = make(reward=by_index)
    rollouts.check_health(10.0)
    running.stop()
    with pytest.raises(RuntimeError, match="does not answer"):
        rollouts.check_health(0.5)


def test_a_full_queue_holds_rollouts_back(make: Make) -> None:
    rollouts = make(reward=by_index, args={"queue_maxsize": 3})
    rollouts.start()
    eventually(rollouts.rollout_buffer.full)
    assert rollouts.rollout_buffer.qsize() == 3
    assert len(take(rollouts, 12)) == 12


def test_stop_cancels_what_is_in_flight(make: Make, client: RolloutClient, running: WorkerThread) -> None:
    running.engine.seconds_per_token = 100.0
    rollouts = make(reward=by_index)
    rollouts.start()
    rollouts.start()  # a second call does nothing
    eventually(lambda: client.status().trajectories_running == 8)
    rollouts.stop()
    eventually(lambda: client.status().trajectories_running == 0)
    rollouts.check_health(10.0)
    running.engine.seconds_per_token = 0.0
    rollouts.start()
    assert len(take(rollouts, 4)) == 4


def test_a_worker_that_is_full_is_asked_again(
    make: Make, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, refused = client.submit, threading.Event()

    def once(groups: Any, **options: Any) -> Any:
        if not refused.is_set():
            refused.set()
            raise Overloaded("no room")
        return submit(groups, **options)

    monkeypatch.setattr(client, "submit", once)
    rollouts = make(reward=by_index, args={"max_inflight_tasks": 1})
    rollouts.start()
    assert len(take(rollouts, 4)) == 4
    assert refused.is_set()
