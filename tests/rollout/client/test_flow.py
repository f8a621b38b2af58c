"""What arrives is counted and reported whoever reads it, and what cannot be read ends no other wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgpack
import numpy as np
import pytest

from protocols import Ack, Internal, Limits, Record, Segment, TrajectoryDone, WorkerStatus, encode
from rollout.client import RolloutClient
from tests.rollout.client.fake_worker import FakeWorker, make_record

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]
Later = Callable[..., Future[Any]]

SMALL = Limits(chunk_bytes=4096, window_bytes=32768)


def test_received_bytes_are_reported_while_nobody_reads(start: Start, connect: Connect) -> None:
    worker = start(hold=True, limits=SMALL)
    client = connect(worker, timeout=1.0)
    batch = client.submit(client.group([1], n=16))
    worker.finish(sampled=2000)  # 26 kB each: in chunks, and many windows together
    worker.wait_for(lambda: worker.of(Ack) and worker.of(Ack)[-1].received_bytes == sum(worker.event_bytes))
    reported = [0, *(ack.received_bytes for ack in worker.of(Ack))]
    largest = max(worker.event_bytes)
    assert largest < 2 * SMALL.chunk_bytes
    assert max(np.diff(reported)) < SMALL.window_bytes // 2 + largest
    assert client.ping().boot_id == "boot-1"
    assert len(batch.results()) == 16


def test_a_slow_consumer_holds_up_no_other_batch(start: Start, connect: Connect) -> None:
    worker = start(limits=SMALL)
    client = connect(worker)
    slow = client.submit(client.group([1], n=20))
    iterator = iter(slow)
    next(iterator)
    for _ in range(3):
        assert len(client.submit(client.group([1], n=5)).results()) == 5
        client.ping()
    assert len(list(iterator)) == 19


def test_the_count_begins_again_with_each_connection(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker, timeout=1.0)
    group = client.group([1], n=2)
    batch = client.submit(group)
    worker.finish(group.trajectory_ids[0])
    next(iter(batch))
    worker.cut()
    worker.wait_for(lambda: worker.kinds().count("hello") == 2)
    worker.event_bytes.clear()  # what comes again after the welcome may be in it or not
    acks = len(worker.of(Ack))
    worker.finish(group.trajectory_ids[1], sampled=1000)
    worker.wait_for(lambda: len(worker.of(Ack)) > acks)
    one = worker.of(Ack)[-1].received_bytes
    assert sum(worker.event_bytes) <= one < 2 * sum(worker.event_bytes)
    assert len(batch.results()) == 1


def test_chunked_records_arrive_whole_and_may_alternate_with_replies(start: Start, connect: Connect) -> None:
    client = connect(start(limits=SMALL, hold=False))
    prompt = np.arange(400) % 1000
    found = client.submit(client.group(prompt, n=8)).results()
    for i, trajectory in enumerate(found):
        assert trajectory.prompt_ids.tolist() == prompt.tolist()
        assert trajectory.response_ids.tolist() == [i + 1] * 4


@pytest.mark.parametrize(
    "junk", [[b""], [b"\xc1"], [b"\x80"], [msgpack.packb({"type": "nothing", "id": "x"})], [b"x" * 50, b"y"]]
)
def test_junk_costs_a_connection_and_nothing_else(start: Start, connect: Connect, junk: list[bytes]) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    batch = client.submit(group)
    worker.finish(group.trajectory_ids[0])
    worker.send_raw(junk)
    worker.wait_for(lambda: worker.kinds().count("hello") == 2)
    worker.finish(group.trajectory_ids[1])
    assert [t.trajectory_id for t in batch] == list(group.trajectory_ids)
    assert worker.kinds().count("submit") == 1


def test_mutated_messages_leave_a_working_client(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    batch = client.submit(group)
    record = make_record(group.trajectory_ids[0], group, batch.batch_id)
    valid = [bytes(frame) for frame in encode(TrajectoryDone(id="x", record=record))]
    choose = random.Random(0)
    for _ in range(100):
        frames = list(valid)
        at = choose.randrange(len(frames))
        frame = bytearray(frames[at])
        for _ in range(choose.randint(1, 4)):
            frame[choose.randrange(len(frame))] = choose.randrange(256)
        frames[at] = bytes(frame[: choose.randint(0, len(frame))]) if choose.random() < 0.3 else bytes(frame)
        if choose.random() < 0.2:
            del frames[at]
        worker.send_raw(frames)
    assert client.ping().boot_id == "boot-1"
    batch.close()
    worker.do(lambda: setattr(worker, "hold", False))
    for _ in range(3):
        assert len(client.submit(client.group([1], n=2)).results(timeout=10)) == 2


def test_a_reply_that_cannot_be_read_fails_its_call_alone(start: Start, connect: Connect) -> None:
    def mangle(message: Any, frames: list[Any]) -> list[Any]:
        return [frames[0].replace(b"uptime_s", b"uptime_x")] if isinstance(message, WorkerStatus) else frames

    worker = start(mangle=mangle)
    client = connect(worker)
    with pytest.raises(Internal, match="uptime"):
        client.status()
    assert client.ping().boot_id == "boot-1"
    assert worker.kinds() == ["hello", "status"]


def short_logprobs(record: Record) -> TrajectoryDone:
    """What no correct worker can send: one logprob too few."""
    segment = record.segments[0]
    bad = Segment.model_construct(**(dict(segment) | {"logprobs": segment.logprobs[:-1]}))
    return TrajectoryDone.model_construct(
        protocol=1,
        id="",
        type="trajectory_done",
        record=Record.model_construct(**(dict(record) | {"segments": (bad,)})),
    )


def test_a_result_that_cannot_be_read_is_fetched_again(start: Start, connect: Connect) -> None:
    broken = iter([True, True])

    def mangle(message: Any, frames: list[Any]) -> list[Any]:
        if isinstance(message, TrajectoryDone) and next(broken, False):
            bad = short_logprobs(message.record).model_copy(update={"id": message.id})
            return list(encode(bad))
        return frames

    worker = start(mangle=mangle)
    client = connect(worker)
    assert len(client.submit(client.group([1])).results(timeout=10)) == 1
    assert worker.kinds() == ["hello", "submit", "hello", "hello"]


def test_lengths_that_differ_raise_and_only_in_their_batch(start: Start, connect: Connect) -> None:
    def mangle(message: Any, frames: list[Any]) -> list[Any]:
        if isinstance(message, TrajectoryDone) and message.record.trajectory_id == "bad.1":
            return list(encode(short_logprobs(message.record).model_copy(update={"id": message.id})))
        return frames

    worker = start(mangle=mangle)
    client = connect(worker)
    bad = client.submit(client.group([1], n=3, id="bad"))
    found: list[str] = []
    for _ in range(2):  # the second time with what lay behind it on the wire
        with pytest.raises(Internal, match="4 entries for 5"):
            found.extend(trajectory.trajectory_id for trajectory in bad)
        client.ping()
    assert sorted(found) == ["bad.0", "bad.2"]
    hellos = worker.kinds().count("hello")
    for _ in range(3):
        assert len(client.submit(client.group([1])).results(timeout=10)) == 1
    assert worker.kinds().count("hello") == hellos
    bad.close()
    worker.wait_for(lambda: {"bad.0", "bad.2"} <= worker.acknowledged())


def test_what_is_acknowledged_leaves_soon_by_itself_and_together(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker, timeout=100.0)  # no ping takes it along
    group = client.group([1], n=200)
    for _ in client.submit(group):
        pass
    worker.wait_for(lambda: worker.acknowledged() == set(group.trajectory_ids))
    assert len([ack for ack in worker.of(Ack) if ack.trajectory_ids]) < 100


def test_what_is_acknowledged_is_told_before_whatever_is_asked_next(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.client.loop.ACK_S", 60.0)
    worker = start()
    client = connect(worker, timeout=100.0)
    group = client.group([1], n=5)
    for _ in range(2):  # the ids are free again at once
        batch = client.submit(group)
        assert [trajectory.trajectory_id for trajectory in batch] == list(group.trajectory_ids)
        assert client.status().results_unacknowledged == 0
    assert len([ack for ack in worker.of(Ack) if ack.trajectory_ids]) == 2
