"""A batch: what iterating it yields, acknowledges and gives up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from protocols import BadRequest, Cancel, Timeout, TurnDone
from rollout.client import ClientClosed, RolloutClient
from tests.rollout.client.fake_worker import FakeWorker

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]


def test_a_batch_yields_every_trajectory_once_and_stops(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    groups = [client.group([1, 2, 3], n=3, metadata={"task": i}) for i in range(2)]
    batch = client.submit(groups, batch_id="b")
    seen = list(batch)
    assert {t.trajectory_id for t in seen} == {name for group in groups for name in group.trajectory_ids}
    assert len(seen) == len(batch) == batch.ended == 6
    assert [t.metadata["task"] for t in seen] == [0, 0, 0, 1, 1, 1]
    assert list(batch) == []
    worker.wait_for(lambda: worker.acknowledged() == {t.trajectory_id for t in seen})


def test_results_are_in_request_order_whatever_ends_first(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    groups = [client.group([1], n=2), client.group([2], n=2)]
    batch = client.submit(groups)
    names = [name for group in groups for name in group.trajectory_ids]
    for name in (names[3], names[0], names[2], names[1]):
        worker.finish(name)
    assert [t.trajectory_id for t in batch.results(timeout=10)] == names


def test_groups_come_whole_and_in_sample_order(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    first, second = client.group([1], n=2, id="first"), client.group([2], n=2, id="second")
    batch = client.submit([first, second])
    for name in ("first.1", "second.1", "second.0", "first.0"):
        worker.finish(name)
    found = [[t.trajectory_id for t in group] for group in batch.groups()]
    assert found == [["second.0", "second.1"], ["first.0", "first.1"]]


def test_groups_after_single_trajectories_are_refused(start: Start, connect: Connect) -> None:
    client = connect(start())
    batch = client.submit(client.group([1], n=3))
    next(iter(batch))
    with pytest.raises(BadRequest, match="one by one"):
        next(batch.groups())
    assert len(batch.results()) == 2


def test_auto_ack_follows_the_iteration(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    batch = client.submit(client.group([1], n=2))
    iterator = iter(batch)
    first = next(iterator)
    client.ping()
    assert worker.acknowledged() == set()
    second = next(iterator)
    worker.wait_for(lambda: worker.acknowledged() == {first.trajectory_id})
    assert next(iterator, None) is None
    worker.wait_for(lambda: worker.acknowledged() == {first.trajectory_id, second.trajectory_id})


def test_ids_are_free_for_the_next_submit(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    group = client.group([1], n=2)
    for _ in range(3):
        assert len(client.submit(group, batch_id="b").results()) == 2
    kinds = [request.type for request in worker.requests if request.type != "ping"]
    assert kinds[:6] == ["hello", "submit", "ack", "submit", "ack", "submit"]


def test_without_auto_ack_the_caller_acknowledges(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    found = client.submit(client.group([1], n=3), auto_ack=False).results()
    gc.collect()  # the batch is gone; what it yielded is the caller's
    client.ping()
    assert worker.acknowledged() == set()
    found[1].ack()
    found[1].ack()
    worker.wait_for(lambda: worker.acknowledged() == {found[1].trajectory_id})


def test_an_abandoned_iteration_can_be_taken_up_again(start: Start, connect: Connect) -> None:
    client = connect(start())
    batch = client.submit(client.group([1], n=4))
    early = []
    for trajectory in batch:
        early.append(trajectory.trajectory_id)
        if len(early) == 2:
            break
    rest = [t.trajectory_id for t in batch]
    assert len(set(early) | set(rest)) == 4
    assert len(rest) == 2


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_a_batch_given_up_is_cancelled_and_acknowledged(start: Start, connect: Connect, how: str) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=3)
    batch = client.submit(group)
    worker.finish(group.trajectory_ids[0])
    assert next(iter(batch)).trajectory_id == group.trajectory_ids[0]
    if how == "close":
        batch.close()
    elif how == "with":
        with batch:
            pass
    else:
        del batch
        gc.collect()
    worker.wait_for(lambda: worker.acknowledged() == set(group.trajectory_ids))
    assert {name for cancel in worker.of(Cancel) for name in cancel.trajectory_ids} == set(group.trajectory_ids[1:])
    assert not worker.session.owed
    client.submit(group).close()  # the ids are free again


def test_closing_a_batch_wakes_whoever_waits_for_it(start: Start, connect: Connect, later: Callable[..., Any]) -> None:
    worker = start(hold=True)
    client = connect(worker)
    batch = client.submit(client.group([1]))
    waiting = later(next, iter(batch))
    client.ping()
    batch.close()
    with pytest.raises(ClientClosed, match=batch.batch_id):
        waiting.result(10)
    with pytest.raises(ClientClosed, match=batch.batch_id):
        batch.results()
    assert client.ping().boot_id == "boot-1"


def test_a_remote_batch_must_be_iterated_by_events(start: Start, connect: Connect) -> None:
    client = connect(start())
    batch = client.submit(client.group([1], environment="remote"))
    for iterator in (iter(batch), batch.groups()):
        with pytest.raises(BadRequest, match="events"):
            next(iterator)
    assert isinstance(next(batch.events()), TurnDone)


def test_results_with_a_timeout_lose_nothing(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    batch = client.submit(group)
    worker.finish(group.trajectory_ids[0])
    with pytest.raises(Timeout):
        batch.results(timeout=0.1)
    worker.finish(group.trajectory_ids[1])
    assert [t.trajectory_id for t in batch.results()] == list(group.trajectory_ids)
