"""Both faces over the real service, with an engine made of a formula."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols import BadRequest, ConnectionLost, PrefixMismatch, ShuttingDown, TurnDone, WeightsInvalid
from rollout.client import AsyncRolloutClient, RolloutClient, Trajectory, sampling, turn
from rollout.service.service import Timeouts
from tests.rollout.timed_engine import TimedEngine, reply_ids, reply_logprobs
from tests.rollout.workers import LIMITS, ROOT, WorkerProcess, WorkerThread, eventually, worker

Later = Callable[..., Future[Any]]


def connected(served: WorkerThread | WorkerProcess | str, **options: Any) -> RolloutClient:
    address = served if isinstance(served, str) else served.address
    return RolloutClient(address, **({"timeout": 10.0} | options))


def test_two_scripted_turns() -> None:
    with worker() as served, connected(served) as client:
        group = client.group([5, 6, 7], n=2, max_tokens=4, script=[turn([8], glue=[9, 10])], metadata={"task": 1})
        for i, trajectory in enumerate(client.submit(group).results(timeout=20)):
            assert trajectory.prompt_ids.tolist() == [5, 6, 7]
            assert len(trajectory.response_ids) == 4 + 3 + 4
            np.testing.assert_array_equal(trajectory.response_ids[:4], reply_ids(3, 4))
            np.testing.assert_array_equal(trajectory.response_logprobs[:4], reply_logprobs(4))
            assert trajectory.response_mask.tolist() == [1] * 4 + [0] * 3 + [1] * 4
            assert (trajectory.sample_index, trajectory.metadata) == (i, {"task": 1})
            assert len(trajectory.turns) == 2
        status = client.status()
        assert (status.trajectories_running, status.results_unacknowledged) == (0, 0)


def test_a_remote_environment_whose_answers_are_repeated() -> None:
    with worker() as served, connected(served) as client:
        batch = client.submit(client.group([1, 2], n=4, max_tokens=3, environment="remote", on_length="continue"))
        rewards = []
        for event in batch.events():
            if isinstance(event, Trajectory):
                rewards.append(event.reward)
                assert [t.length for t in event.turns] == [3, 3]
            elif event.turn.index == 0:
                client.continue_(event, observation=[5])
                client.continue_(event, observation=[5])
                with pytest.raises(PrefixMismatch):
                    client.continue_(event, observation=[6])
            else:
                client.continue_(event, done=True, reward=0.5)
        assert rewards == [0.5] * 4


def test_groups_of_many_batches_at_once(later: Later) -> None:
    with worker() as served, connected(served) as client:

        def work(number: int) -> int:
            groups = [client.group([number + 1] * 5, n=4, max_tokens=8) for _ in range(10)]
            return sum(len(group) for group in client.submit(groups).groups())

        assert [later(work, i).result(30) for i in range(4)] == [40] * 4


def test_weights_scores_and_refusals() -> None:
    with worker() as served, connected(served) as client:
        assert client.update_weights("/w/1", 1).digest == "stub:/w/1"
        assert client.update_weights("/w/2", 2, mode="abort", digest="stub:/w/2").version == 2
        with pytest.raises(WeightsInvalid):
            client.update_weights("/bad", 3)
        with pytest.raises(WeightsInvalid, match="digest"):
            client.update_weights("/w/3", 3, digest="stub:/w/4")
        with pytest.raises(BadRequest, match="version"):
            client.update_weights("/w/1", 1)
        prepared = client.prepare_weights("/w/3", 3)
        client.abort_weights(prepared)
        prepared = client.prepare_weights("/w/4", 4)
        assert client.commit_weights(prepared).version == client.commit_weights(prepared).version == 4
        (trajectory,) = client.submit(client.group([1], max_tokens=2)).results(timeout=10)
        assert trajectory.weight_version_min == 4
        scored = client.score([[1, 2, 3]], sampling(temperature=0.5))
        assert len(scored.logprobs["processed"][0]) == 3
        assert scored.weight_version == 4
        with pytest.raises(BadRequest, match="environment"):
            client.submit(client.group([1], environment="nobody has this"))


def test_work_that_waits_for_weights_says_so_and_for_which() -> None:
    with worker() as served, connected(served) as client:
        batch = client.submit([client.group([1], n=2, max_tokens=2, min_version=v) for v in (8, 7)])
        eventually(lambda: "4 waiting (4 for weights 7 or later)" in repr(client.status()))
        assert repr(batch).endswith("0 of 4 ended, 4 wait for weights of version 7, the worker serves 0)")
        client.update_weights("/w/7", 7)
        eventually(lambda: batch.ended == 2)
        assert repr(batch).endswith("2 of 4 ended, 2 wait for weights of version 8, the worker serves 7)")
        assert "2 waiting (2 for weights 8 or later)" in repr(client.status())
        client.update_weights("/w/8", 8)
        assert len(batch.results(timeout=10)) == 4
        assert repr(batch).endswith("4 of 4 ended)")
        assert "wanted_version" not in client.status().wire


def test_cancel_pause_and_drain(later: Later) -> None:
    with worker(TimedEngine(seconds_per_token=0.01)) as served, connected(served) as client:
        group = client.group([1], n=3, max_tokens=10_000)
        batch = client.submit(group)
        assert client.cancel(trajectory_ids=group.trajectory_ids[:1])["cancelled"] == 1
        assert next(iter(batch)).finish_reason == "abort_client"
        batch.close()
        eventually(lambda: client.status().trajectories_running == 0)
        assert client.status().results_unacknowledged == 0
        client.pause()
        assert client.status().state == "paused"
        results = later(client.submit(client.group([1], max_tokens=3)).results)
        client.resume()
        assert len(results.result(10)) == 1
        assert client.drain(5.0) == {"running": 0, "waiting": 0}
        with pytest.raises(ShuttingDown):
            client.submit(client.group([1]))
        client.resume()
        assert len(client.submit(client.group([1], max_tokens=1)).results(timeout=10)) == 1


def test_asyncio() -> None:
    async def main(address: str) -> None:
        async with AsyncRolloutClient(address, timeout=10.0) as client:
            await client.update_weights("/w/1", 1)
            batch = await client.submit([client.group([i + 1], n=4, max_tokens=5) for i in range(8)])
            assert len([t async for t in batch]) == 32
            batch = await client.submit(
                client.group([1], n=2, max_tokens=5, environment="remote", on_length="continue")
            )
            async for event in batch.events():
                if isinstance(event, TurnDone):
                    await client.continue_(event, done=True, reward=1.0)
                else:
                    assert event.reward == 1.0

    with worker() as served:
        asyncio.run(main(served.address))


def test_long_results_a_slow_reader_and_small_windows() -> None:
    limits = LIMITS.model_copy(update={"chunk_bytes": 2**14, "window_bytes": 2**16})
    with worker(limits=limits) as served, connected(served) as client:
        slow = client.submit([client.group(np.arange(4000) % 1000, n=4, max_tokens=4000) for _ in range(8)])
        for _ in range(5):
            assert len(client.submit(client.group([1], max_tokens=2)).results(timeout=20)) == 1
            client.ping(timeout=5)
        results = slow.results(timeout=60)
        assert len(results) == 32
        for trajectory in results:
            np.testing.assert_array_equal(trajectory.response_ids, reply_ids(4000, 4000))
        assert client.status().wire["window_stalls"] > 0


def test_a_worker_restarted_under_a_waiting_client(later: Later) -> None:
    first = WorkerThread(TimedEngine(seconds_per_token=0.5)).start()
    with connected(first) as client:
        client.update_weights("/w/1", 1)
        quick, slow = client.group([1], n=2, max_tokens=1), client.group([2], n=3, max_tokens=100)
        batch = client.submit([quick, slow])
        iterator = iter(batch)
        seen = [next(iterator).trajectory_id, next(iterator).trajectory_id]
        rest = later(list, iterator)
        # As a killed process: the socket goes, nobody says anything.
        first.call(lambda service: service._channel.close(0.0))
        second = WorkerThread(TimedEngine(), address=first.address).start()
        try:
            found = rest.result(20)
            assert {t.weight_version_min for t in found} == {1}
            assert sorted(seen + [t.trajectory_id for t in found]) == sorted(quick.trajectory_ids + slow.trajectory_ids)
            assert client.status().weight_digest == "stub:/w/1"
        finally:
            second.stop()
            first.stop()


def test_a_killed_worker_process_and_its_successor(tmp_path: Path, later: Later) -> None:
    first = WorkerProcess("tests.rollout.stub_worker", "--seconds-per-token", "0.5", folder=tmp_path).wait_ready()
    with connected(first, reconnect_timeout=60.0) as client:
        batch = client.submit(client.group([1], n=4, max_tokens=1000))
        results = later(batch.results)
        first.kill()
        second = WorkerProcess("tests.rollout.stub_worker", "--bind", first.address, folder=tmp_path).wait_ready()
        try:
            assert len(results.result(30)) == 4
        finally:
            second.signal(signal.SIGTERM)
            assert second.wait() == 0


def test_a_stopped_worker_process_is_missed_and_found_again(tmp_path: Path) -> None:
    process = WorkerProcess("tests.rollout.stub_worker", "--seconds-per-token", "0.02", folder=tmp_path).wait_ready()
    try:
        with connected(process, timeout=2.0, reconnect_timeout=1.0) as client:
            batch = client.submit(client.group([1], n=2, max_tokens=100))
            process.signal(signal.SIGSTOP)
            with pytest.raises(ConnectionLost, match=process.address):
                next(iter(batch))
            process.signal(signal.SIGCONT)
            client.ping(timeout=20)
            assert len(batch.results(timeout=60)) == 2
    finally:
        process.kill()


def test_a_client_whose_interpreter_is_held_keeps_its_work() -> None:
    """One call into C keeps the GIL for seconds: neither thread of the client runs, libzmq's does."""
    code = """
        import sys, time
        from rollout.client import RolloutClient

        with RolloutClient(sys.argv[1], timeout=1.0) as client:
            batch = client.submit([client.group([1] * 100, n=8, max_tokens=2000) for _ in range(20)])
            before = time.monotonic()
            size = 10**7
            while time.monotonic() - before < 2.5:
                before = time.monotonic()
                sum(range(size))
                size *= 2
            assert len(batch.results(timeout=60)) == 160
            print("kept", flush=True)
    """
    limits = LIMITS.model_copy(update={"window_bytes": 2**16, "chunk_bytes": 2**14})
    with worker(limits=limits, heartbeat_timeout=4.0) as served:
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), served.address],
            cwd=ROOT,
            timeout=120,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (result.returncode, result.stdout) == (0, "kept\n"), result.stderr
        assert served.call(lambda service: service._wire())["trajectories_cut_off"] == 0


def test_a_killed_client_leaves_nothing_running() -> None:
    code = """
        import sys, time
        from rollout.client import RolloutClient
        client = RolloutClient(sys.argv[1])
        batch = client.submit(client.group([1], n=4, max_tokens=100000))
        print("submitted", flush=True)
        time.sleep(600)
    """
    timeouts = Timeouts(client=1.0, drain=1.0, ack=1.0)
    with worker(TimedEngine(seconds_per_token=1.0), timeouts=timeouts) as served, connected(served) as other:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), served.address], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"submitted\n"
        assert other.status().sessions == 2
        process.kill()
        process.wait()
        process.stdout.close()
        before = time.monotonic()
        eventually(lambda: other.status().trajectories_running == 0)
        assert time.monotonic() - before < 8
        assert len(other.submit(other.group([1], max_tokens=1)).results(timeout=10)) == 1
