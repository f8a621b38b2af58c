from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from protocols.codec import encode
from protocols.errors import Overloaded
from protocols.fields import Budget, Environment, Group, Sampling, ScriptedTurn
from protocols.replies import TrajectoryDone
from rollout.admission import SLACK, Admission, largest_record, longest
from rollout.service import Service
from rollout.sessions import Session
from rollout.submitted import Batch, Member, SubmittedGroup
from tests.rollout.raw_client import RawClient
from tests.rollout.raw_client import group as raw_group
from tests.rollout.workers import eventually, served, worker

MAX_CONTEXT = 600


def group(prompt: int = 3, max_tokens: int | None = 10, **fields: Any) -> Group:
    sampling = Sampling(max_tokens=max_tokens)
    return Group(
        **{"id": "g", "prompt": np.zeros(prompt, np.int32), "trajectory_ids": ("t",), "sampling": sampling, **fields}
    )


def scripted(*turns: tuple[int, int, int | None]) -> Environment:
    return Environment(
        script=[
            ScriptedTurn(glue=np.zeros(glue, np.int32), observation=np.zeros(seen, np.int32), max_tokens=tokens)
            for glue, seen, tokens in turns
        ]
    )


# Sizes.


def test_the_longest_trajectory_of_a_script_is_counted_turn_by_turn() -> None:
    assert longest(group(), MAX_CONTEXT) == 13
    assert longest(group(environment=scripted((1, 2, None), (0, 5, 7))), MAX_CONTEXT) == 13 + 13 + 12
    assert longest(group(max_tokens=None), MAX_CONTEXT) == MAX_CONTEXT
    assert longest(group(max_tokens=10**6), MAX_CONTEXT) == MAX_CONTEXT
    assert longest(group(budget=Budget(max_total_tokens=9)), MAX_CONTEXT) == 9
    assert longest(group(environment=Environment(name="remote")), MAX_CONTEXT) == MAX_CONTEXT


def test_what_a_group_asks_for_is_reserved_for() -> None:
    plain = largest_record(group(), MAX_CONTEXT)
    top = Sampling(max_tokens=10, top_logprobs=64)
    assert largest_record(group(sampling=top), MAX_CONTEXT) == plain + 10 * 64 * 8
    modes = Sampling(max_tokens=10, logprobs=("raw", "processed", "temperature"))
    assert largest_record(group(sampling=modes), MAX_CONTEXT) >= plain + 13 * 8
    allowed = Sampling(max_tokens=10, allowed_ids=np.zeros(5000, np.int32))
    assert largest_record(group(sampling=allowed), MAX_CONTEXT) >= plain + 20_000
    assert largest_record(group(metadata={"note": "x" * 3000}), MAX_CONTEXT) >= plain + 3000


def random_group(chance: random.Random, name: str) -> dict[str, Any]:
    def ids(most: int) -> np.ndarray:
        return np.array([chance.randrange(1000) for _ in range(chance.randint(0, most))], np.int32)

    sampling: dict[str, Any] = {
        "logprobs": chance.choice((["processed"], ["raw", "processed"], ["temperature", "raw", "processed"])),
        "top_logprobs": chance.choice((0, 0, 1, 64)),
        "prompt_logprobs": chance.random() < 0.3,
        "stop_ids": ids(64).tolist(),
    }
    if chance.random() < 0.3:
        sampling["allowed_ids"] = np.arange(chance.randint(1, 1000), dtype=np.int32)
    script = [{"glue": ids(5), "observation": ids(30), "max_tokens": chance.choice((None, 1, 40))} for _ in ids(12)]
    return raw_group(
        name,
        n=2,
        prompt=np.arange(chance.randint(1, 200)),
        max_tokens=chance.choice((None, 1, 7, 100)),
        sampling=sampling,
        environment={"script": script},
        budget={"max_turns": chance.choice((None, 2)), "max_total_tokens": chance.choice((None, 300))},
        metadata={"x" * chance.randint(0, 200): list(range(chance.randint(0, 500)))},
    )


def test_no_record_is_larger_than_what_was_reserved_for_it() -> None:
    chance = random.Random(5)

    def sizes(service: Service) -> list[tuple[int, int, int]]:
        members = service.sessions.all[0].trajectories.values()
        return [
            (
                sum(len(frame) for frame in encode(TrajectoryDone(id="x" * 256, record=member.record))),
                member.reserved,
                member.group.largest,
            )
            for member in members
            if member.record is not None
        ]

    with worker(what=served(max_context=MAX_CONTEXT)) as thread, RawClient(thread.address) as client:
        client.hello()
        groups = [random_group(chance, f"g{i}") for i in range(100)]
        assert client.call("submit", batch_id="b", groups=groups)["type"] == "accepted"
        eventually(lambda: thread.service.runs.results == 200)
        measured = thread.call(sizes)
        assert len(measured) == 200
        for encoded, kept, reserved in measured:
            assert encoded <= kept <= reserved
        # Scripted lengths are known well: most of what is reserved is used by the longest of them.
        assert sum(encoded for encoded, _, _ in measured) > 0.5 * sum(kept for _, kept, _ in measured)
        client.send("ack", trajectory_ids=[f"g{i}.{j}" for i in range(100) for j in range(2)])
        eventually(lambda: thread.service.batches.admission.reserved_bytes == 0)


# Order.


class Queue:
    """An admission and members made for it."""

    def __init__(self, result_bytes: int = 100, at_once: int = 100, max_waiting: int = 100) -> None:
        self.admission = Admission(result_bytes=result_bytes, at_once=at_once, max_waiting=max_waiting)
        self.batch = Batch(Session("s", "client"), "b", "submit", 0.0, 0)
        self.order = 0

    def add(self, largest: int = 1, **fields: Any) -> Member:
        group_ = SubmittedGroup(self.batch, group(**fields), b"", 0, 0, largest, 0.0)
        member = Member(f"t{self.order}", group_, 0, 0, self.order, 0.0)
        self.order += 1
        self.admission.queue(member)
        return member

    def start(self, version: int = 0) -> list[Member]:
        started = []
        while (member := self.admission.next(version)) is not None:
            member.started = True
            started.append(member)
        return started


def test_room_is_taken_at_the_start_trimmed_at_the_end_and_given_back_with_the_ack() -> None:
    queue = Queue(result_bytes=100)
    first, second, third = queue.add(60), queue.add(30), queue.add(30)
    assert queue.start() == [first, second]
    assert queue.admission.reserved_bytes == 90
    assert (queue.admission.running, queue.admission.waiting, queue.admission.stalls) == (2, 1, 1)
    queue.admission.ended(first, 50)
    assert queue.start() == []
    queue.admission.ended(second, 5)
    assert queue.start() == [third]
    queue.admission.keep(first, 0)
    queue.admission.keep(second, 0)
    queue.admission.ended(third, 30)
    queue.admission.keep(third, 0)
    assert queue.admission.reserved_bytes == queue.admission.running == queue.admission.waiting == 0


def test_a_large_one_is_not_overtaken_for_ever_by_small_ones() -> None:
    queue = Queue(result_bytes=100)
    running = queue.add(50)
    assert queue.start() == [running]
    large = queue.add(100)
    small = queue.add(1)
    assert queue.start() == []
    queue.admission.ended(running, 10)
    queue.admission.keep(running, 0)
    assert queue.start() == [large]
    queue.admission.ended(large, 0)
    assert queue.start() == [small]


def test_what_waits_for_a_version_is_stepped_over_and_comes_back_in_its_order() -> None:
    queue = Queue(at_once=3)
    new = queue.add(min_version=5)
    old = queue.add(min_version=1)
    any_ = queue.add()
    assert queue.start(version=1) == [old, any_]
    later = queue.add()
    assert queue.start(version=4) == [later]
    queue.admission.ended(old, 0)
    last = queue.add()
    queue.admission.ended(any_, 0)
    assert queue.start(version=5) == [new, last]


def test_what_is_about_to_end_is_not_started() -> None:
    queue = Queue()
    first, second = queue.add(), queue.add()
    first.ending = "abort_client"
    assert queue.start() == [second]


def test_the_queue_does_not_keep_what_left_it_out_of_turn() -> None:
    queue = Queue(at_once=1)
    first = queue.add()
    assert queue.start() == [first]
    kept = queue.add(min_version=3)
    for i in range(3 * SLACK):
        member = queue.add(min_version=i % 2 * 9)
        queue.admission.start(member, 0)
        member.started = True
        queue.admission.ended(member, 0)
    assert len(queue.admission._ready) + len(queue.admission._too_new) <= SLACK + 3
    queue.admission.ended(first, 0)
    assert queue.start(version=3) == [kept]


def test_too_many_are_refused_as_a_whole() -> None:
    queue = Queue(max_waiting=3)
    queue.add()
    queue.admission.check(2)
    with pytest.raises(Overloaded, match="1 trajectories wait already and 3 more exceed 3"):
        queue.admission.check(3)
