"""What is open, received and acknowledged, as plain state; and random histories of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import BatchDone, Duplicate, Group, Record, SubmitBatch, Turn, TurnDone
from protocols.requests import Cancel
from rollout.client.ledger import REMEMBERED, Arrival, Item, Ledger, Submitted, weights_wait
from rollout.client.waiting import Mailbox
from tests.protocols import samples


def submit(batch: str = "b", n: int = 3, **options: Any) -> SubmitBatch:
    names = tuple(f"{batch}.{i}" for i in range(n))
    group = Group(id=f"{batch}-g", prompt=np.array([1], np.int32), trajectory_ids=names, **options)
    return SubmitBatch(id=f"{batch}-request", batch_id=batch, groups=(group,))


def added(ledger: Ledger, message: SubmitBatch, auto_ack: bool = True) -> Submitted:
    mailbox: Mailbox[Item] = Mailbox(sum(len(group.trajectory_ids) for group in message.groups))
    return ledger.add(message, mailbox, auto_ack)


def turn_done(name: str, index: int, request: str = "b-request") -> TurnDone:
    return TurnDone(
        id=request,
        trajectory_id=name,
        turn=Turn(index=index, start=1, length=1, finish_reason="stop"),
        total_len=2,
        token_ids=np.array([1], np.int32),
        logprobs=np.array([0], np.float32),
    )


def test_a_record_is_news_once() -> None:
    ledger = Ledger()
    added(ledger, submit())
    assert ledger.receive("b.0") is Arrival.FIRST
    assert ledger.receive("b.0") is Arrival.REPEATED
    assert ledger.acknowledge(["b.0"]) == ["b.0"]
    assert ledger.acknowledge(["b.0"]) == []
    assert ledger.receive("b.0") is Arrival.UNWANTED
    assert ledger.receive("else") is Arrival.UNKNOWN


def test_parts_of_a_group_that_come_together_are_one_group_and_none_of_them_is_lost() -> None:
    def part(*names: str, indices: tuple[int, ...] | None = None, counted: int = 0) -> Group:
        prompt = np.array([1], np.int32)
        return Group(id="g", prompt=prompt, trajectory_ids=names, sample_indices=indices, counted=counted)

    ledger = Ledger()
    message = SubmitBatch(id="r", batch_id="b", groups=(part("g.3", indices=(3,), counted=1),))
    mailbox: Mailbox[Item] = Mailbox(4)
    batch = ledger.add(message, mailbox, True, (part("g.0", "g.1"), part("g.2", indices=(2,))))
    assert ledger.receive("g.1") is Arrival.FIRST
    again = ledger.start_again("r2", batch)
    assert again is not None
    (group,) = again.groups
    assert dict(zip(group.trajectory_ids, group.sample_indices or (), strict=True)) == {"g.3": 3, "g.0": 0, "g.2": 2}
    assert group.counted == 1
    ledger.keep(BatchDone(id="r2", batch_id="b", counts={}, wall_s=0.0, kept=("g.0", "g.2", "g.3")))
    (left,) = mailbox.kept
    assert set(left.trajectory_ids) == {"g.0", "g.2", "g.3"}


def test_what_has_not_arrived_cannot_be_acknowledged() -> None:
    ledger = Ledger()
    added(ledger, submit())
    assert ledger.acknowledge(["b.0", "else"]) == []
    assert ledger.open_count == 3


def test_a_batch_is_forgotten_with_its_last_trajectory() -> None:
    ledger = Ledger()
    message = submit(n=2)
    added(ledger, message)
    for name in ("b.0", "b.1"):
        ledger.receive(name)
    with pytest.raises(Duplicate):
        added(ledger, message)
    ledger.acknowledge(["b.0"])
    with pytest.raises(Duplicate, match=r"b\.1"):
        added(ledger, SubmitBatch(id="x", batch_id="other", groups=message.groups))
    ledger.acknowledge(["b.1"])
    added(ledger, message)
    assert ledger.receive("b.0") is Arrival.FIRST  # the id is free, and news again


def test_a_refused_duplicate_changes_nothing() -> None:
    ledger = Ledger()
    added(ledger, submit())
    clash = Group(id="g2", prompt=np.array([1], np.int32), trajectory_ids=("fresh", "b.1"))
    with pytest.raises(Duplicate):
        added(ledger, SubmitBatch(id="x", batch_id="c", groups=(clash,)))
    assert ledger.owner("fresh") is None
    assert list(ledger.batches) == ["b"]


def test_starting_again_takes_what_is_open_with_its_noise_keys() -> None:
    ledger = Ledger()
    batch = added(ledger, submit(sample_indices=(5, 3, 8)))
    ledger.receive("b.1")
    again = ledger.start_again("new", batch)
    assert again is not None
    assert (again.id, again.batch_id) == ("new", "b")
    assert (again.groups[0].trajectory_ids, again.groups[0].sample_indices) == (("b.0", "b.2"), (5, 8))
    assert ledger.by_request("new") is batch
    for name in ("b.0", "b.2"):
        ledger.receive(name)
    assert ledger.start_again("newer", batch) is None


def test_turns_are_news_in_order_and_only_of_the_present_run() -> None:
    ledger = Ledger()
    batch = added(ledger, submit())
    assert ledger.is_news(turn_done("b.0", 0))
    assert not ledger.is_news(turn_done("b.0", 0))
    assert ledger.is_news(turn_done("b.0", 1))
    assert not ledger.is_news(turn_done("else", 0))
    ledger.start_again("new", batch)
    assert not ledger.is_news(turn_done("b.0", 2))
    assert ledger.is_stale("b.0", "b-request")
    assert not ledger.is_stale("b.0", "new")
    assert ledger.is_news(turn_done("b.0", 0, "new"))
    ledger.receive("b.0")
    assert not ledger.is_news(turn_done("b.0", 1, "new"))


def test_giving_up_cancels_what_runs_and_acknowledges_what_came() -> None:
    ledger = Ledger()
    batch = added(ledger, submit())
    ledger.receive("b.0")
    assert ledger.give_up(batch) == (["b.0"], ["b.1", "b.2"])
    assert ledger.give_up(batch) == ([], [])
    assert ledger.receive("b.1") is Arrival.UNWANTED
    assert ledger.start_again("new", batch) is None
    assert not ledger.batches


def test_giving_up_leaves_to_the_caller_what_only_the_caller_acknowledges() -> None:
    ledger = Ledger()
    batch = added(ledger, submit(), auto_ack=False)
    ledger.receive("b.0")
    assert ledger.give_up(batch) == ([], ["b.1", "b.2"])
    assert ledger.acknowledge(["b.0"]) == ["b.0"]


@pytest.mark.parametrize(
    "request_", [{"trajectory_ids": ("b.1",)}, {"group_ids": ("b-g",)}, {"batch_ids": ("b",)}, {"batch_ids": ("c",)}]
)
def test_cancelled_ones_are_remembered(request_: dict[str, Any]) -> None:
    ledger = Ledger()
    batch = added(ledger, submit())
    ledger.cancelled(Cancel(id="x", **request_))
    named = {"trajectory_ids": {"b.1"}, "group_ids": {"b.0", "b.1", "b.2"}, "batch_ids": {"b.0", "b.1", "b.2"}}
    expected = set() if request_ == {"batch_ids": ("c",)} else named[next(iter(request_))]
    assert batch.cancelled == expected


def test_memory_of_acknowledged_ids_is_bounded() -> None:
    ledger = Ledger()
    for start in range(0, REMEMBERED + 100, 100):
        message = submit(f"batch-{start}", n=100)
        added(ledger, message)
        for name in message.groups[0].trajectory_ids:
            ledger.receive(name)
        ledger.acknowledge(message.groups[0].trajectory_ids)
    assert len(ledger._acknowledged) == REMEMBERED
    assert ledger.receive("batch-0.0") is Arrival.UNKNOWN


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["record", "ack", "restart"]), st.integers(0, 3)), max_size=40))
def test_any_history_delivers_each_record_once(history: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    batch = added(ledger, submit(n=4))
    delivered: list[str] = []
    running = {f"b.{i}" for i in range(4)}  # what a worker would know
    for step, number in history:
        name = f"b.{number}"
        if step == "record" and name in running:
            if ledger.receive(name) is Arrival.FIRST:
                delivered.append(name)
        elif step == "ack":
            if ledger.acknowledge([name]):
                running.discard(name)
        elif step == "restart" and batch in ledger.batches.values():
            again = ledger.start_again(f"r{len(delivered)}", batch)
            running = set(again.groups[0].trajectory_ids) if again is not None else set()
            assert running.isdisjoint(delivered)
    assert len(delivered) == len(set(delivered))
    delivered += [name for name in sorted(running) if ledger.receive(name) is Arrival.FIRST]
    assert sorted(delivered) == [f"b.{i}" for i in range(4)]


# Batches that end early.


def record(name: str, status: str = "truncated") -> Record:
    reason = {"truncated": "length", "failed": "error"}[status]
    said = {"trajectory_id": name, "group_id": name[0], "status": status, "finish_reason": reason}
    return samples.record().model_copy(update=said)


def tail(**wanted: Any) -> tuple[Ledger, Submitted]:
    """Groups a and c of three samples each."""
    ledger = Ledger()
    groups = [
        Group(id=name, prompt=np.array([1], np.int32), trajectory_ids=[f"{name}.{i}" for i in range(3)])
        for name in "ac"
    ]
    return ledger, added(ledger, SubmitBatch(id="x", batch_id="b", groups=groups, **wanted))


def take(ledger: Ledger, *names: str, status: str = "truncated") -> None:
    for name in names:
        assert ledger.receive(name) is Arrival.FIRST
        ledger.count(record(name, status))


def test_what_the_worker_has_kept_is_open_no_more_and_knows_what_its_group_had() -> None:
    ledger, batch = tail(groups_needed=1, min_complete=2)
    take(ledger, "a.0", "a.1", "c.0")
    done = BatchDone(id="x", batch_id="b", counts={}, wall_s=1.0, kept=("a.2", "c.1", "c.2"))
    assert ledger.keep(done) is batch.mailbox
    assert batch.mailbox.left == 6 - 3
    assert {part.id: (part.trajectory_ids, part.counted) for part in batch.mailbox.kept} == {
        "a": (("a.2",), 2),
        "c": (("c.1", "c.2"), 1),
    }
    assert ledger.owner("c.1") is None
    ledger.keep(done)  # it may come twice
    assert len(batch.mailbox.kept) == 2
    ledger.acknowledge(["a.0", "a.1", "c.0"])
    assert not ledger.batches


@pytest.mark.parametrize(
    ("taken", "failed", "needed", "min_complete"),
    [
        ((), (), 2, 2),
        (("a.0", "a.1"), (), 1, 2),
        (("a.0", "a.1", "c.0", "c.1"), (), 0, 2),
        (("c.2",), ("a.0", "a.1", "a.2"), None, None),
    ],
)
def test_what_starts_again_needs_what_is_still_missing(
    taken: tuple[str, ...], failed: tuple[str, ...], needed: int | None, min_complete: int | None
) -> None:
    ledger, batch = tail(groups_needed=2, min_complete=2)
    take(ledger, *taken)
    take(ledger, *failed, status="failed")
    again = ledger.start_again("new", batch)
    assert again is not None
    assert (again.groups_needed, again.min_complete) == (needed, min_complete)
    assert {group.id: group.counted for group in again.groups}.get("c") == sum(name[0] == "c" for name in taken)


def test_what_was_resumed_starts_anew_in_a_worker_that_has_not_kept_it() -> None:
    ledger = Ledger()
    part = Group(id="g", prompt=np.array([1], np.int32), trajectory_ids=("t.1",), sample_indices=(1,), counted=3)
    message = SubmitBatch(id="x", batch_id="b", resume=("t.1",))
    batch = ledger.add(message, Mailbox(1), True, (part,))
    again = ledger.start_again("new", batch)
    assert again is not None
    assert (again.resume, again.groups) == ((), (part,))


def test_what_waits_for_weights_is_told_once_and_only_after_a_while() -> None:
    ledger = Ledger()
    groups = tuple(
        Group(id=name, prompt=np.array([1], np.int32), trajectory_ids=(f"{name}.0", f"{name}.1"), min_version=version)
        for name, version in (("a", 5), ("b", 7), ("c", None))
    )
    batch = ledger.add(SubmitBatch(id="x", batch_id="b", groups=groups), Mailbox(6), True)
    assert ledger.late(4, seconds=60) == []
    assert ledger.late(7, seconds=0) == []
    assert ledger.late(4, seconds=0) == ["batch b: 4 wait for weights of version 5, the worker serves 4"]
    assert ledger.late(4, seconds=0) == []
    assert weights_wait(batch.groups.values(), 6, 6) == "2 wait for weights of version 7, the worker serves 6"
    assert weights_wait(batch.groups.values(), 1, 6).startswith("1 wait")
    assert weights_wait(batch.groups.values(), 0, 4) == ""
    batch.late, batch.given_up = False, True
    assert ledger.late(4, seconds=0) == []
