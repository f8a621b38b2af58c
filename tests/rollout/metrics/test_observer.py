"""What an observer is told, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from protocols.fields import Record
from rollout.metrics.observer import Observer, Round
from tests.rollout.raw_client import RawClient, group
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.workers import eventually, worker


@dataclass
class Notes(Observer):
    """An observer that writes everything down."""

    told: list[tuple[Any, ...]] = field(default_factory=list)

    def batch_accepted(self, batch: Round, trajectories: int) -> None:
        self.told.append(("accepted", batch.batch_id, batch.step, trajectories))

    def trajectory_ended(self, batch: Round, record: Record, version: int) -> None:
        self.told.append(("ended", batch.batch_id, record.trajectory_id, record.finish_reason, version))

    def group_done(self, batch: Round, group_id: str, seconds: float) -> None:
        assert seconds >= 0
        self.told.append(("group", batch.batch_id, group_id))

    def batch_done(self, batch: Round) -> None:
        self.told.append(("batch", batch.batch_id))

    def weights_prepared(self, version: int, seconds: float, nbytes: int) -> None:
        assert seconds >= 0
        self.told.append(("prepared", version, nbytes))

    def weights_committed(self, version: int, paused_s: float) -> None:
        self.told.append(("committed", version, paused_s))

    def weights_failed(self, stage: Literal["prepare", "commit"]) -> None:
        self.told.append(("failed", stage))


def submit(client: RawClient, batch: str, *groups: dict[str, Any], **fields: Any) -> None:
    assert client.call("submit", batch_id=batch, groups=list(groups), **fields)["type"] == "accepted"


def load(client: RawClient, version: int, path: str = "/w") -> None:
    if client.call("prepare_weights", update_id=f"u{version}", path=path, version=version)["type"] != "error":
        client.call("commit_weights", update_id=f"u{version}", version=version, mode="abort")


def test_an_observer_hears_of_accept_ends_groups_and_batch_in_the_order_of_events() -> None:
    notes = Notes()
    with worker(TimedEngine(0.01), observer=notes) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, "b", group("slow", n=1, max_tokens=20), group("fast", n=2, max_tokens=2), step=41)
        client.event("batch_done")
    assert notes.told[0] == ("accepted", "b", 41, 3)
    assert sorted(notes.told[1:3]) == [("ended", "b", "fast.0", "length", 0), ("ended", "b", "fast.1", "length", 0)]
    assert notes.told[3:] == [
        ("group", "b", "fast"),
        ("ended", "b", "slow.0", "length", 0),
        ("group", "b", "slow"),
        ("batch", "b"),
    ]


def test_without_a_step_a_batch_counts_by_the_weight_version_that_served_at_accept() -> None:
    notes = Notes()
    with worker(TimedEngine(0.01), observer=notes) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, "first", group("a", n=1, max_tokens=1))
        client.event("batch_done")
        load(client, 9)
        submit(client, "second", group("b", n=1, max_tokens=1))
        client.event("batch_done")
    assert [(told[1], told[2]) for told in notes.told if told[0] == "accepted"] == [("first", 0), ("second", 9)]
    assert [told for told in notes.told if told[0] in ("prepared", "committed")] == [
        ("prepared", 9, 1000),
        ("committed", 9, 0.001),
    ]
    assert [told[-1] for told in notes.told if told[0] == "ended"] == [0, 9]


def test_a_repeat_of_a_submit_is_no_new_work_and_a_failed_update_is_told() -> None:
    notes = Notes()
    with worker(TimedEngine(0.01), observer=notes) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, "b", group("g", n=2, max_tokens=50))
        submit(client, "b", group("g", n=2, max_tokens=50))
        load(client, 1, path="/bad")
        client.event("batch_done")
    assert [told for told in notes.told if told[0] == "accepted"] == [("accepted", "b", 0, 2)]
    assert ("failed", "prepare") in notes.told


def test_what_nobody_wants_any_more_still_ends() -> None:
    notes = Notes()
    with worker(TimedEngine(5.0), observer=notes) as served:
        with RawClient(served.address) as client:
            client.hello()
            submit(client, "b", group("g", n=2, max_tokens=50))
            eventually(lambda: len(served.engine.live) == 2)
        session = served.call(lambda service: next(iter(service.sessions.all)))
        served.call(lambda service: service.batches.expire(session))
        eventually(lambda: ("batch", "b") in notes.told)
    assert [told[3] for told in notes.told if told[0] == "ended"] == ["abort_client"] * 2


def test_one_that_does_nothing_takes_it_all() -> None:
    with worker(TimedEngine(), observer=Observer()) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, "b", group("g", n=1, max_tokens=1))
        load(client, 1)
        load(client, 2, path="/bad")
        assert client.event("batch_done")["counts"] == {"truncated": 1}
