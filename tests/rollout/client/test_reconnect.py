"""Connections that break under a worker that lives on: the session goes on, nothing comes twice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from protocols import (
    BadRequest,
    Cancel,
    CommitWeightsRequest,
    Continue,
    Hello,
    NotReady,
    PauseRequest,
    PrepareWeightsRequest,
    Score,
    StatusRequest,
    SubmitBatch,
    Timeout,
    TrajectoryDone,
    TurnDone,
)
from rollout.client import RolloutClient, Trajectory
from tests.rollout.client.fake_worker import FakeWorker, make_record

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]
Later = Callable[..., Future[Any]]


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (StatusRequest, lambda c: c.status()),
        (PauseRequest, lambda c: c.pause()),
        (Cancel, lambda c: c.cancel(batch_ids=["b"])),
        (Score, lambda c: c.score([[1]])),
        (PrepareWeightsRequest, lambda c: c.update_weights("/w", 1)),
        (CommitWeightsRequest, lambda c: c.update_weights("/w", 1)),
        (SubmitBatch, lambda c: c.submit(c.group([1]), batch_id="b").results()),
    ],
)
def test_a_request_whose_reply_was_lost_is_sent_again(
    start: Start, connect: Connect, later: Later, kind: type[Any], call: Callable[[RolloutClient], Any]
) -> None:
    worker = start()
    client = connect(worker)
    client.connect()
    worker.refuse(kind, None)
    result = later(call, client)
    worker.wait_for(lambda: worker.of(kind))
    del worker.answers[kind]
    worker.cut()
    result.result(10)
    first, second = worker.of(kind)
    assert first == second


def test_a_lost_reply_to_continue_is_harmless(start: Start, connect: Connect, later: Later) -> None:
    worker = start()
    client = connect(worker)
    events = client.submit(client.group([1], environment="remote")).events()
    turn = next(events)
    assert isinstance(turn, TurnDone)
    worker.refuse(Continue, None)
    answer = later(client.continue_, turn, done=True, reward=0.5)
    worker.wait_for(lambda: worker.of(Continue))
    del worker.answers[Continue]
    worker.cut()  # the worker shows the turn again, then gets the answer again
    answer.result(10)
    last = next(events)
    assert isinstance(last, Trajectory)
    assert last.reward == 0.5
    assert next(events, None) is None


def test_after_a_broken_connection_the_session_goes_on(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=3)
    batch = client.submit(group)
    worker.finish(group.trajectory_ids[0])
    seen = [next(iter(batch)).trajectory_id]
    for name in group.trajectory_ids[1:]:
        hellos = worker.kinds().count("hello")
        worker.cut()
        worker.wait_for(lambda: worker.kinds().count("hello") > hellos)  # noqa: B023
        worker.finish(name)
    seen += [t.trajectory_id for t in batch]
    assert seen == list(group.trajectory_ids)
    assert worker.kinds().count("submit") == 1
    assert len(worker.sessions) == 1
    worker.wait_for(lambda: not worker.session.owed)  # also what was acknowledged on a connection that broke


def test_results_that_come_again_are_dropped(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    batch = client.submit(group, auto_ack=False)
    worker.finish()
    copies = list(worker.session.owed.values())
    for copy in copies:
        worker.send(copy)
    found = batch.results()
    assert [t.trajectory_id for t in found] == list(group.trajectory_ids)
    found[0].ack()
    worker.wait_for(lambda: worker.acknowledged() == {found[0].trajectory_id})
    worker.send(copies[0])  # as if that acknowledgement had been lost: it is repeated
    worker.wait_for(
        lambda: sum(copies[0].record.trajectory_id in r.trajectory_ids for r in worker.requests if r.type == "ack") >= 2
    )
    worker.send(copies[1])
    client.ping()
    assert worker.acknowledged() == {found[0].trajectory_id}


def test_a_record_of_an_unknown_trajectory_is_left_to_the_worker(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    batch = client.submit(group)
    other = client.group([1])
    message = worker.of(SubmitBatch)[0]
    worker.send(TrajectoryDone(id=message.id, record=make_record(other.trajectory_ids[0], other, "elsewhere")))
    worker.finish()
    assert len(batch.results()) == 2
    client.ping()
    assert worker.acknowledged() == set(group.trajectory_ids)


def test_a_session_that_the_worker_has_forgotten_starts_again(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    client.update_weights("/w/1", 1)
    batch = client.submit(client.group([1]))
    worker.wait_for(lambda: worker.session.running)
    worker.resumes = False
    worker.hold = False
    worker.cut()
    assert len(batch.results()) == 1
    assert worker.kinds() == ["hello", "prepare_weights", "commit_weights", "submit", "hello", "submit"]


def test_weights_that_another_client_set_back_are_left_alone(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    client.update_weights("/w/1", 1)
    batch = client.submit(client.group([1]))
    worker.do(lambda: setattr(worker, "weight_version", 0))
    worker.cut()
    worker.wait_for(lambda: worker.kinds().count("hello") == 2)
    worker.finish()
    assert len(batch.results()) == 1
    assert worker.kinds().count("prepare_weights") == 1


def test_a_submit_without_reply_is_cancelled_when_its_time_is_up(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    client.connect()
    worker.refuse(SubmitBatch, None)
    group = client.group([1])
    with pytest.raises(Timeout, match=f"no reply to SubmitBatch from {worker.address}"):
        client.submit(group, timeout=0.2)
    worker.wait_for(lambda: worker.of(Cancel))
    assert worker.of(Cancel)[0].trajectory_ids == group.trajectory_ids


def test_a_worker_that_is_not_ready_yet_is_asked_again(start: Start, connect: Connect, later: Later) -> None:
    worker = start()
    worker.refuse(Hello, NotReady("loading"))
    client = connect(worker)
    with pytest.raises(NotReady, match="loading"):
        client.ping(timeout=0.3)
    ping = later(client.ping)
    del worker.answers[Hello]
    assert ping.result(10).boot_id == "boot-1"


def test_a_connection_without_a_session_is_greeted_again(start: Start, connect: Connect, later: Later) -> None:
    worker = start()
    client = connect(worker)
    client.connect()
    worker.refuse(StatusRequest, NotReady("say hello first", scope="session"))
    status = later(client.status)
    worker.wait_for(lambda: worker.kinds().count("hello") >= 2)
    worker.answers.clear()
    assert status.result(10).boot_id == "boot-1"


def test_a_worker_that_refuses_for_good_ends_everything(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    batch = client.submit(client.group([1]))
    worker.refuse(Hello, BadRequest("this end speaks protocol 2 only", field="protocol"))
    worker.cut()
    for call in (batch.results, client.ping, client.connect, lambda: client.submit(client.group([1]))):
        with pytest.raises(BadRequest, match="protocol 2"):
            call()
