"""Who starts, in which order, and for how much room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocols.errors import Overloaded
from protocols.fields import Group, Sampling
from rollout.batches.admission import SLACK, Admission
from rollout.batches.submitted import Batch, Member, SubmittedGroup
from rollout.wire.sessions import Session


def group(prompt: int = 3, max_tokens: int | None = 10, **fields: Any) -> Group:
    sampling = Sampling(max_tokens=max_tokens)
    return Group(
        **{"id": "g", "prompt": np.zeros(prompt, np.int32), "trajectory_ids": ("t",), "sampling": sampling, **fields}
    )


class Queue:
    """An admission and members made for it."""

    def __init__(self, result_bytes: int = 100, at_once: int = 100, max_waiting: int = 100) -> None:
        self.admission = Admission(result_bytes=result_bytes, at_once=at_once, max_waiting=max_waiting)
        self.batch = Batch(Session("s", "client"), "b", "submit", 0.0, 0)
        self.order = 0

    def add(self, largest: int = 1, **fields: Any) -> Member:
        group_ = SubmittedGroup(self.batch, group(**fields), 0, 0, largest, 0.0)
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
    assert (queue.admission.waiting_for_weights, queue.admission.wanted_version) == (1, 5)
    later = queue.add()
    assert queue.start(version=4) == [later]
    queue.admission.ended(old, 0)
    last = queue.add()
    queue.admission.ended(any_, 0)
    assert queue.start(version=5) == [new, last]
    assert (queue.admission.waiting_for_weights, queue.admission.wanted_version) == (0, None)


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


def test_when_nothing_waits_the_queue_keeps_nothing() -> None:
    queue = Queue()
    first, too_new = queue.add(), queue.add(min_version=3)
    assert queue.start() == [first]
    assert len(queue.admission._too_new) == 1
    too_new.started = True
    queue.admission.start(too_new, 0)
    assert not queue.admission._ready
    assert not queue.admission._too_new


def test_too_many_are_refused_as_a_whole() -> None:
    queue = Queue(max_waiting=3)
    queue.add()
    queue.admission.check(2)
    with pytest.raises(Overloaded, match="1 trajectories wait already and 3 more exceed 3"):
        queue.admission.check(3)
