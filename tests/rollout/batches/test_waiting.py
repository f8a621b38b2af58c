"""Who waits, and who has waited for too long."""

from __future__ import annotations

import time

import numpy as np

from protocols.fields import Budget, Group, Sampling
from rollout.batches.submitted import Batch, Member, SubmittedGroup
from rollout.batches.waiting import Waiting
from rollout.wire.sessions import Session
from tests.rollout.workers import on_loop, soon


def group(seconds: float | None) -> SubmittedGroup:
    spec = Group(
        id="g",
        prompt=np.zeros(3, np.int32),
        trajectory_ids=("t",),
        sampling=Sampling(max_tokens=1),
        budget=Budget(trajectory_deadline_s=seconds),
    )
    return SubmittedGroup(Batch(Session("s", "client"), "b", "submit", 0.0, 0), spec, 0, 0, 0, time.monotonic())


def member(group: SubmittedGroup, name: str, *, ago: float = 0.0) -> Member:
    return Member(name, group, 0, 0, 0, time.monotonic() - ago)


def waiting() -> tuple[Waiting, list[str]]:
    """And the ids of those that are overdue."""
    overdue: list[str] = []
    return Waiting(lambda member: overdue.append(member.id)), overdue


@on_loop
async def test_each_is_overdue_at_its_own_time_and_waits_until_it_is_removed() -> None:
    queue, overdue = waiting()
    of = group(0.1)
    late, early = member(of, "late"), member(of, "early", ago=0.07)
    for each in (early, late):
        queue.add(each)
    assert not early.started
    await soon(lambda: overdue == ["early"])
    assert set(queue) == {early, late}
    await soon(lambda: overdue == ["early", "late"])
    assert time.monotonic() - late.accepted >= 0.1
    queue.remove(early)
    assert early.started
    assert list(queue) == [late]
    assert late in queue
    assert early not in queue


@on_loop
async def test_one_that_goes_on_beside_new_ones_has_only_what_is_left_of_its_time() -> None:
    queue, overdue = waiting()
    of = group(60.0)
    queue.add(member(of, "new"))
    queue.add(member(of, "resumed", ago=59.95))
    await soon(lambda: overdue == ["resumed"])
    assert of.deadline is not None, "the other one is watched no longer"
    assert [each.id for each in of.waiting] == ["new"]


@on_loop
async def test_a_group_of_which_none_waits_has_no_timer() -> None:
    queue, overdue = waiting()
    of = group(60.0)
    first, second = member(of, "first"), member(of, "second")
    queue.add(first)
    queue.add(second)
    timer = of.deadline
    assert timer is not None
    queue.remove(first)
    assert of.deadline is timer
    queue.remove(second)
    assert timer.cancelled()
    assert of.deadline is None
    queue.add(first)
    assert of.deadline is not None
    queue.remove(first)
    assert overdue == []


@on_loop
async def test_without_a_deadline_there_is_no_timer() -> None:
    queue, _ = waiting()
    of = group(None)
    queue.add(member(of, "t"))
    assert of.deadline is None
    assert len(queue) == 1
