"""The synchronous face, method by method."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols import (
    AbortWeightsRequest,
    BadRequest,
    Cancel,
    CommitWeightsRequest,
    Continue,
    Drain,
    Duplicate,
    Limits,
    Overloaded,
    PrepareWeightsRequest,
    PromptTooLong,
    Score,
    SubmitBatch,
    Timeout,
    TurnDone,
    WeightsInvalid,
)
from rollout.client import ClientClosed, RolloutClient, Trajectory, sampling, turn
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


def test_a_batch_carries_the_trainers_step(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    client.submit(client.group([1]), step=np.int64(7)).results()
    client.submit(client.group([1])).results()
    assert [message.step for message in worker.of(SubmitBatch)] == [7, None]
    with pytest.raises(BadRequest, match="step"):
        client.submit(client.group([1]), step=-1)


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


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6_addresses(start: Start, connect: Connect) -> None:
    assert connect(start("tcp://[::1]:*")).ping().boot_id == "boot-1"


def test_ipc_addresses(start: Start, connect: Connect, tmp_path: Path) -> None:
    assert connect(start(f"ipc://{tmp_path}/worker")).ping().boot_id == "boot-1"


def test_remote_turns_are_answered(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    batch = client.submit(client.group([1, 2], n=2, environment="remote"))
    ended = {}
    for event in batch.events():
        if isinstance(event, Trajectory):
            ended[event.trajectory_id] = event.reward
        elif event.turn.index == 0:
            client.continue_(event, glue=[9], observation=[5, 6], max_tokens=3, turn_reward=0.5)
        else:
            client.continue_(event, done=True, reward=1, rewards={"format": 0.25})
    assert list(ended.values()) == [1.0, 1.0]
    first, *_, last = worker.of(Continue)
    assert (first.turn, first.expected_len, first.turn_reward, first.max_tokens) == (0, 6, 0.5, 3)
    assert first.observation is not None
    assert first.observation.tolist() == [5, 6]
    assert (last.turn, last.expected_len, last.done, last.rewards) == (1, 10, True, {"format": 0.25})


def test_a_remote_batch_must_be_iterated_by_events(start: Start, connect: Connect) -> None:
    client = connect(start())
    batch = client.submit(client.group([1], environment="remote"))
    for iterator in (iter(batch), batch.groups()):
        with pytest.raises(BadRequest, match="events"):
            next(iterator)
    assert isinstance(next(batch.events()), TurnDone)


def test_cancel_returns_counts_and_the_records_still_come(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    batch = client.submit(group)
    assert client.cancel(trajectory_ids=group.trajectory_ids[:1]) == {"cancelled": 1}
    assert client.cancel(group_ids=[group.id]) == {"cancelled": 1}
    assert [t.finish_reason for t in batch.results()] == ["abort_client"] * 2


def test_cancel_takes_one_id_for_one_and_not_for_its_letters(start: Start, connect: Connect) -> None:
    client = connect(start(hold=True))
    batch = client.submit(client.group([1], n=3), batch_id="b1")
    one, two, _ = batch.submitted[0].trajectory_ids
    assert client.cancel(trajectory_ids=one) == {"cancelled": 1}
    assert client.cancel(trajectory_ids=[two]) == {"cancelled": 1}
    assert client.cancel(batch_ids="b1") == {"cancelled": 1}


def test_a_relative_path_of_weights_starts_at_the_trainer(
    start: Start, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = start()
    connect(worker).update_weights("w1", 1)
    assert [request.path for request in worker.of(PrepareWeightsRequest)] == [str(tmp_path / "w1")]


def test_update_weights_prepares_then_commits_what_it_prepared(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    done = client.update_weights("/w/1", 1, drain_timeout=5, on_timeout="fail", checksums={"a": "sha256:0"})
    assert (done.version, done.digest, done.load_s, done.paused_s, done.bytes) == (1, "digest-1", 0.25, 0.125, 10)
    prepare, commit = worker.of(PrepareWeightsRequest)[0], worker.of(CommitWeightsRequest)[0]
    assert (prepare.path, prepare.version, prepare.checksums) == ("/w/1", 1, {"a": "sha256:0"})
    assert commit.update_id == prepare.update_id == done.update_id
    assert (commit.digest, commit.mode, commit.drain_timeout_s, commit.on_drain_timeout) == (
        "digest-1",
        "drain",
        5,
        "fail",
    )


def test_a_failed_commit_frees_what_was_prepared(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    worker.refuse(CommitWeightsRequest, WeightsInvalid("digest differs", field="digest"))
    with pytest.raises(WeightsInvalid):
        client.update_weights("/w/1", 1, digest="other", mode="abort")
    assert worker.of(CommitWeightsRequest)[0].digest == "other"
    worker.wait_for(lambda: worker.of(AbortWeightsRequest))


def test_weights_in_three_calls(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    prepared = client.prepare_weights("/w/2", 2, update_id="u", force=True)
    assert worker.of(PrepareWeightsRequest)[0].force
    assert client.commit_weights(prepared, mode="abort").version == 2
    client.abort_weights(prepared)
    client.abort_weights("u2")
    assert [request.update_id for request in worker.of(AbortWeightsRequest)] == ["u", "u2"]


def test_score(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    scored = client.score([[1, 2, 3], np.array([4])], sampling(temperature=0.5), sampled=[[0, 1, 1], [0]])
    assert [len(row) for row in scored.logprobs["processed"]] == [3, 1]
    request = worker.of(Score)[0]
    assert request.sampling.temperature == 0.5
    assert request.sampled is not None
    assert request.sampled[0].tolist() == [0, 1, 1]


def test_small_calls(start: Start, connect: Connect) -> None:
    worker = start(weight_version=3)
    client = connect(worker)
    assert client.connect().model.vocab_size == 1000
    assert client.session == worker.session.token
    assert client.status().weight_version == 3
    assert client.ping().boot_id == "boot-1"
    client.pause()
    client.resume()
    assert client.drain(5.0) == {"running": 0}
    assert worker.of(Drain)[0].timeout_s == 5.0
    assert worker.kinds() == ["hello", "status", "pause", "resume", "drain"]


def test_a_script_travels(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    client.submit(client.group([1], script=[[5, 6], turn([7], glue=[8], max_tokens=2)])).results()
    script = worker.of(SubmitBatch)[0].groups[0].environment.script
    assert [entry.observation.tolist() for entry in script if entry.observation is not None] == [[5, 6], [7]]
    assert script[1].max_tokens == 2


@pytest.mark.parametrize(
    ("limits", "make", "named"),
    [
        (Limits(max_groups=1), lambda c: [c.group([1]), c.group([1])], "max_groups"),
        (Limits(max_trajectories=3), lambda c: [c.group([1], n=4)], "max_trajectories"),
        (Limits(max_metadata=100), lambda c: [c.group([1], metadata={"a": "x" * 200})], "max_metadata"),
        (Limits(max_frame=1000), lambda c: [c.group([1] * 300)], "max_frame"),
        (Limits(max_message=1000), lambda c: [c.group([1] * 200), c.group([1] * 200)], "max_message"),
        (Limits(max_header=1500), lambda c: [c.group([1], n=200)], "max_header"),
        (Limits(max_blobs=2), lambda c: [c.group([1]), c.group([1]), c.group([1])], "max_blobs"),
    ],
)
def test_what_exceeds_a_limit_is_refused_by_name_before_it_is_sent(
    start: Start, connect: Connect, limits: Limits, make: Callable[[RolloutClient], list[object]], named: str
) -> None:
    worker = start(limits=limits)
    client = connect(worker)
    client.connect()
    with pytest.raises(BadRequest, match=named):
        client.submit(make(client))  # type: ignore[arg-type]
    client.ping()
    assert not worker.of(SubmitBatch)


def test_prompts_are_checked_against_the_model(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    with pytest.raises(PromptTooLong, match=r"groups\[1\].prompt"):
        client.submit([client.group([1]), client.group([1] * 512)])
    with pytest.raises(BadRequest, match=r"groups\[0\].prompt"):
        client.submit(client.group([1000]))
    assert not worker.of(SubmitBatch)


def test_a_refused_submit_leaves_nothing_behind(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    worker.refuse(SubmitBatch, Overloaded("full"))
    group = client.group([1])
    with pytest.raises(Overloaded) as refusal:
        client.submit(group)
    assert refusal.value.retryable
    del worker.answers[SubmitBatch]
    assert len(client.submit(group).results()) == 1


def test_open_ids_cannot_be_submitted_twice(start: Start, connect: Connect) -> None:
    client = connect(start(hold=True))
    group = client.group([1])
    batch = client.submit(group, batch_id="b")
    with pytest.raises(Duplicate, match=r"groups\[0\].trajectory_ids"):
        client.submit(group)
    with pytest.raises(Duplicate, match="batch b"):
        client.submit(client.group([1]), batch_id="b")
    assert batch.ended == 0


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


def test_use_after_close_raises(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    batch = client.submit(group)
    worker.finish(group.trajectory_ids[0])
    client.ping()  # the record came before its answer
    client.close()
    client.close()
    for call in (client.ping, lambda: client.submit(client.group([1])), lambda: next(iter(batch))):
        with pytest.raises(ClientClosed):
            call()
    worker.wait_for(lambda: worker.of(Cancel))
    assert worker.of(Cancel)[0].trajectory_ids == group.trajectory_ids[1:]


def test_closing_with_open_work_says_so(start: Start, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(start(hold=True))
    batch = client.submit(client.group([1], n=2))
    client.close()
    assert "2 trajectories open" in caplog.text
    del batch


def test_closing_without_cancel_leaves_the_work_to_the_session(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    first = connect(worker)
    group = first.group([1], n=2, id="g")
    batch = first.submit(group, batch_id="b")
    first.close(cancel=False)
    with pytest.raises(ClientClosed):
        next(iter(batch))
    assert not worker.of(Cancel)
    second = connect(worker, session=first.session)
    assert second.connect().resumed
    assert second.session == first.session
    batch = second.submit(group, batch_id="b")
    worker.finish()
    assert len(batch.results()) == 2


def test_closing_wakes_whoever_waits(start: Start, connect: Connect) -> None:
    client = connect(start(hold=True))
    batch = client.submit(client.group([1]))
    errors: list[BaseException] = []

    def iterate() -> None:
        try:
            next(iter(batch))
        except ClientClosed as error:
            errors.append(error)

    thread = threading.Thread(target=iterate)
    thread.start()
    client.close()
    thread.join(10)
    assert len(errors) == 1


def test_bad_addresses_and_options_are_refused_at_once() -> None:
    for address in ("127.0.0.1:5557", "tcp://nowhere", "inproc://x", "tcp://a b:1", ""):
        with pytest.raises(BadRequest, match="address"):
            RolloutClient(address)
    for options in ({"timeout": 0}, {"reconnect_timeout": -1}, {"curve_public_key": "x"}, {"curve_server_key": "x"}):
        with pytest.raises(BadRequest):
            RolloutClient("tcp://127.0.0.1:1", **options)  # type: ignore[arg-type]
