"""The asyncio face: the same methods, the same promises."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protocols import Cancel, ConnectionLost, StatusRequest, SubmitBatch, Timeout, TurnDone
from rollout.client import AsyncBatch, AsyncRolloutClient, Batch, ClientClosed, Trajectory
from tests.rollout.client.fake_worker import FakeWorker
from tests.rollout.client.test_liveness import free_address

Start = Callable[..., FakeWorker]


@asynccontextmanager
async def client_of(worker: FakeWorker, **options: Any) -> AsyncIterator[AsyncRolloutClient]:
    async with AsyncRolloutClient(worker.address, **({"timeout": 10.0} | options)) as client:
        yield client


def test_both_batches_have_the_same_methods() -> None:
    def public(face: type) -> dict[str, list[str]]:
        return {
            name: [f"{p.name}={p.default}" for p in inspect.signature(member).parameters.values()]
            for name, member in inspect.getmembers(face, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert public(Batch) == public(AsyncBatch)
    for name in public(Batch):
        assert inspect.getdoc(getattr(Batch, name)) == inspect.getdoc(getattr(AsyncBatch, name)), name


def test_every_call(start: Start) -> None:
    async def main() -> None:
        worker = start()
        async with client_of(worker) as client:
            assert (await client.connect()).boot_id == "boot-1"
            assert (await client.ping()).boot_id == "boot-1"
            assert (await client.status()).state == "ready"
            await client.pause()
            await client.resume()
            assert await client.drain(1.0) == {"running": 0}
            assert len((await client.score([[1, 2]])).logprobs["processed"][0]) == 2
            assert (await client.update_weights("/w", 1)).digest == "digest-1"
            prepared = await client.prepare_weights("/w", 2)
            assert (await client.commit_weights(prepared, mode="abort")).version == 2
            await client.abort_weights(prepared)
            assert await client.cancel(batch_ids=["none"]) == {"cancelled": 0}
            assert client.session == worker.session.token

    asyncio.run(main())


def test_batches_groups_and_results(start: Start) -> None:
    async def main() -> None:
        worker = start()
        async with client_of(worker) as client:
            batch = await client.submit(client.group([1], n=3))
            assert len([t async for t in batch]) == 3
            batch = await client.submit([client.group([1], n=2), client.group([2], n=1)])
            assert sorted([len(group) async for group in batch.groups()]) == [1, 2]
            async with await client.submit(client.group([1], n=4)) as batch:
                assert [t.sample_index for t in await batch.results(timeout=10)] == [0, 1, 2, 3]

    asyncio.run(main())


def test_remote_turns(start: Start) -> None:
    async def main() -> None:
        async with client_of(start()) as client:
            batch = await client.submit(client.group([1], n=3, environment="remote"))
            rewards = []
            async for event in batch.events():
                if isinstance(event, TurnDone):
                    await client.continue_(event, done=True, reward=event.turn.index + 1.5)
                else:
                    rewards.append(event.reward)
            assert rewards == [1.5] * 3

    asyncio.run(main())


def test_many_tasks_share_a_client(start: Start) -> None:
    async def main() -> None:
        async with client_of(start()) as client:

            async def work() -> list[str]:
                return [t.trajectory_id async for t in await client.submit(client.group([1], n=3))]

            found = [name for names in await asyncio.gather(*(work() for _ in range(20))) for name in names]
            assert len(set(found)) == 60

    asyncio.run(main())


def test_a_cancelled_wait_loses_nothing(start: Start) -> None:
    async def main() -> None:
        worker = start(hold=True)
        async with client_of(worker) as client:
            group = client.group([1], n=2)
            batch = await client.submit(group)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(aiter(batch)), 0.05)
            with pytest.raises(Timeout):
                await batch.results(timeout=0.05)
            await asyncio.to_thread(worker.finish)
            assert [t.trajectory_id for t in await batch.results()] == list(group.trajectory_ids)

    asyncio.run(main())


def test_a_cancelled_submit_is_cancelled(start: Start) -> None:
    async def main() -> None:
        worker = start(hold=True)
        async with client_of(worker, timeout=1.0) as client:
            await client.connect()
            worker.refuse(SubmitBatch, None)
            group = client.group([1])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.submit(group, timeout=60), 0.1)
            await asyncio.to_thread(worker.wait_for, lambda: worker.of(Cancel))
            assert worker.of(Cancel)[0].trajectory_ids == group.trajectory_ids

    asyncio.run(main())


def test_errors_are_those_of_the_other_face(start: Start) -> None:
    async def main() -> None:
        worker = start()
        client = AsyncRolloutClient(worker.address, timeout=10.0)
        await client.connect()
        worker.refuse(StatusRequest, None)
        with pytest.raises(Timeout):
            await client.status(timeout=0.1)
        await client.close()
        with pytest.raises(ClientClosed):
            await client.ping()
        async with AsyncRolloutClient(free_address(), timeout=0.2) as absent:
            with pytest.raises(ConnectionLost):
                await absent.ping()

    asyncio.run(main())


def test_waiting_blocks_no_other_task_and_a_restart_is_survived(start: Start) -> None:
    async def main() -> None:
        worker = start(hold=True)
        async with client_of(worker) as client:
            await client.update_weights("/w/1", 1)
            batch = await client.submit(client.group([1], n=2))
            results: Awaitable[list[Trajectory]] = asyncio.ensure_future(batch.results())
            await asyncio.to_thread(worker.stop)
            successor = await asyncio.to_thread(start, worker.address, boot_id="boot-2")
            assert len(await results) == 2
            assert successor.kinds() == ["hello", "prepare_weights", "commit_weights", "submit"]

    asyncio.run(main())


def test_one_client_for_two_loops(start: Start) -> None:
    client = AsyncRolloutClient(start().address, timeout=10.0)

    async def work() -> int:
        return len(await (await client.submit(client.group([1], n=2))).results())

    assert [asyncio.run(work()), asyncio.run(work())] == [2, 2]
    asyncio.run(client.close())
