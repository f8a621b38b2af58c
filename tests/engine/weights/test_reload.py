"""Weight updates around a running engine: one at a time, idempotent, never stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from engine.errors import WeightsInvalid
from engine.handle import (
    Committed,
    CommitWeights,
    DiscardWeights,
    Prepared,
    PrepareWeights,
    WeightsFailed,
    WeightsReport,
)
from engine.request import Failure
from engine.weights.reload import PrepareEnded, Reload
from tests.engine.host import Host, ask, assert_same, solo
from tests.fake_runner import FakeWeights

MakeHost = Callable[..., Host]


class Rig:
    """`Reload` driven by hand: `prepared` waits for the preparing thread, `advance` makes a tick."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.store = FakeWeights(host.runner)
        self.posted: SimpleQueue[PrepareEnded] = SimpleQueue()
        self.updates = Reload(host.engine, self.store, self.posted.put, host.clock)

    def prepare(self, name: str = "u", path: str = "5", version: int = 2) -> list[WeightsReport]:
        self.updates.prepare(PrepareWeights(name, path, version))
        self.updates.prepare_ended(self.posted.get(timeout=10))
        return self.updates.take_reports()

    def commit(self, name: str = "u", **fields: Any) -> list[WeightsReport]:
        self.updates.commit(CommitWeights(name, **fields))
        return self.advance()

    def advance(self, steps: int = 0) -> list[WeightsReport]:
        for _ in range(steps):
            self.updates.advance()
            self.host.step()
        self.updates.advance()
        return self.updates.take_reports()


@pytest.fixture
def rig(make_host: MakeHost) -> Rig:
    return Rig(make_host())


def failure_of(reports: list[WeightsReport]) -> Failure:
    assert len(reports) == 1
    assert isinstance(reports[0], WeightsFailed)
    return reports[0].failure


def test_an_idle_engine_commits_at_once(rig: Rig) -> None:
    (prepared,) = rig.prepare()
    assert isinstance(prepared, Prepared)
    assert (prepared.update_id, prepared.info.digest) == ("u", "fake:5")
    assert rig.host.runner.weights == 0
    (committed,) = rig.commit()
    assert isinstance(committed, Committed)
    assert committed.info == prepared.info
    assert rig.host.runner.weights == 5
    assert rig.host.engine.weight_version == 2


def test_drain_lets_started_requests_end_and_holds_the_others(rig: Rig) -> None:
    host = rig.host
    started, waiting = ask("a", 20, 10), ask("b", 20, 10)
    host.add(started)
    host.step(2)
    rig.prepare()
    assert rig.commit() == []
    host.add(waiting)
    assert rig.advance(4) == []
    assert host.engine.stats().waiting == 1
    (committed,) = rig.advance(10)
    assert isinstance(committed, Committed)
    host.run()
    assert_same(host.ended["a"], solo(started))
    assert host.ended["a"].weight_versions == ((1, 10),)
    assert host.ended["b"].weight_versions == ((2, 10),)
    assert host.ended["b"].token_ids.tolist() != solo(waiting).token_ids.tolist()


def test_drain_lets_preempted_requests_end_too(make_host: MakeHost) -> None:
    rig = Rig(make_host(runner={"num_blocks": 10}))
    requests = [ask("a", 16, 96, order=1), ask("b", 16, 96, order=2)]
    rig.host.add(*requests)
    while not rig.host.engine.stats().preemptions_total:
        rig.host.step()
    rig.prepare()
    rig.commit()
    (committed,) = rig.advance(400)
    assert isinstance(committed, Committed)
    for request in requests:
        assert_same(rig.host.ended[request.id], solo(request))


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_what_is_left_ends_as_a_partial_with_one_end(rig: Rig, mode: str) -> None:
    host = rig.host
    request = ask("a", 20, 100)
    host.add(request, ask("short", 20, 4))
    host.step(4)
    rig.prepare()
    reports = rig.commit(mode=mode, drain_timeout=5.0)
    if mode == "drain":
        assert reports == []
        host.clock.now += 4.9
        assert rig.advance(3) == []
        host.clock.now += 0.2
        reports = rig.advance()
    assert isinstance(reports[0], Committed)
    host.run()
    assert host.ended["short"].finish_reason == "length"
    partial = host.ended["a"]
    assert partial.finish_reason == "abort_weight_update"
    assert 4 <= len(partial.token_ids) < 12
    assert partial.token_ids.tolist() == solo(request).token_ids[: len(partial.token_ids)].tolist()
    assert partial.weight_versions == ((1, len(partial.token_ids)),)


def test_a_drain_may_fail_at_its_timeout_and_be_tried_again(rig: Rig) -> None:
    host = rig.host
    request = ask("a", 20, 100)
    host.add(request)
    host.step(2)
    rig.prepare()
    assert rig.commit(drain_timeout=5.0, on_timeout="fail") == []
    host.add(ask("b", 20, 3))
    host.clock.now += 5
    assert failure_of(rig.advance()).code == "weights_busy"
    assert rig.updates.deadline is None
    host.step(2)
    assert host.engine.stats().waiting == 0, "admission stayed closed"
    assert host.runner.weights == 0
    (committed,) = rig.commit(mode="abort")
    assert isinstance(committed, Committed)
    host.run()
    assert host.ended["a"].finish_reason == "abort_weight_update"


def test_a_paused_engine_commits_and_stays_paused(rig: Rig) -> None:
    host = rig.host
    host.add(ask("a", 20, 30))
    host.step(3)
    host.engine.pause()
    rig.prepare()
    rig.commit(drain_timeout=2.0)
    assert rig.updates.deadline == host.clock.now + 2.0
    host.clock.now += 2
    assert isinstance(rig.advance()[0], Committed)
    assert host.engine.stats().paused
    assert [c.finish_reason for c in host.step()] == ["abort_weight_update"]


def test_one_update_at_a_time(rig: Rig) -> None:
    go = threading.Event()
    rig.store.before_prepare = lambda: go.wait(10)
    rig.updates.prepare(PrepareWeights("u", "5", 2))
    rig.updates.prepare(PrepareWeights("v", "6", 3))
    assert failure_of(rig.updates.take_reports()).code == "weights_busy"
    assert failure_of(rig.commit("u")).code == "weights_busy"
    assert failure_of(rig.commit("v")).code == "weights_busy"
    go.set()
    rig.updates.prepare_ended(rig.posted.get(timeout=10))
    rig.updates.take_reports()
    assert isinstance(rig.commit("u")[0], Committed)
    assert isinstance(rig.prepare("v", "6", 3)[0], Prepared)


def test_a_commit_of_nothing(rig: Rig) -> None:
    assert failure_of(rig.commit("x")).code == "weights_invalid"
    assert not rig.host.engine.has_work


@pytest.mark.parametrize(
    ("error", "code"),
    [(WeightsInvalid("no", field="w"), "weights_invalid"), (OSError("gone"), "internal"), (MemoryError(), "internal")],
)
def test_a_prepare_that_fails_leaves_all_as_it_was(rig: Rig, error: Exception, code: str) -> None:
    def fail() -> None:
        raise error

    rig.store.before_prepare = fail
    failure = failure_of(rig.prepare())
    assert failure.code == code
    rig.store.before_prepare = lambda: None
    assert isinstance(rig.prepare("v")[0], Prepared)
    assert isinstance(rig.commit("v")[0], Committed)


def test_a_commit_that_fails_leaves_the_old_weights_and_admission_open(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise WeightsInvalid("the copy does not fit")

    rig.prepare()
    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "commit", fail)
        assert failure_of(rig.commit()).message == "the copy does not fit"
    assert rig.host.engine.weight_version == 1
    request = ask("a", 20, 4)
    assert_same(rig.host.run(request)["a"], solo(request))
    assert isinstance(rig.prepare("v")[0], Prepared)
    assert isinstance(rig.commit("v")[0], Committed)


def test_discard_while_preparing(rig: Rig) -> None:
    go = threading.Event()
    rig.store.before_prepare = lambda: go.wait(10)
    rig.updates.prepare(PrepareWeights("u", "5", 2))
    rig.updates.discard(DiscardWeights("other"))
    rig.updates.discard(DiscardWeights("u"))
    assert rig.updates.take_reports() == []
    go.set()
    rig.updates.prepare_ended(rig.posted.get(timeout=10))
    assert failure_of(rig.updates.take_reports()).code == "weights_invalid"
    assert rig.store.prepared is None


def test_what_comes_after_a_discarded_one_waits_for_its_reading_to_end(rig: Rig) -> None:
    """Whoever has given an update up, and has the next one, is not told to come again."""
    go = threading.Event()
    rig.store.before_prepare = lambda: go.wait(10)
    rig.updates.prepare(PrepareWeights("u", "5", 2))
    rig.updates.discard(DiscardWeights("u"))
    rig.updates.prepare(PrepareWeights("v", "6", 3))
    rig.updates.discard(DiscardWeights("v"))
    assert failure_of(rig.updates.take_reports()).message == "the update was discarded"
    rig.updates.prepare(PrepareWeights("w", "7", 4))
    assert rig.updates.take_reports() == []
    rig.updates.prepare(PrepareWeights("x", "8", 5))
    assert failure_of(rig.updates.take_reports()).code == "weights_busy"
    go.set()
    rig.updates.prepare_ended(rig.posted.get(timeout=10))
    assert failure_of(rig.updates.take_reports()).message == "the update was discarded"
    rig.updates.prepare_ended(rig.posted.get(timeout=10))
    (prepared,) = rig.updates.take_reports()
    assert isinstance(prepared, Prepared)
    assert prepared.update_id == "w"
    assert isinstance(rig.commit("w")[0], Committed)
    assert rig.host.engine.weight_version == 4


def test_a_discarded_one_that_fails_lets_the_next_begin(rig: Rig) -> None:
    go = threading.Event()

    def fail() -> None:
        assert go.wait(10)
        rig.store.before_prepare = lambda: None
        raise WeightsInvalid("no")

    rig.store.before_prepare = fail
    rig.updates.prepare(PrepareWeights("u", "5", 2))
    rig.updates.discard(DiscardWeights("u"))
    rig.updates.prepare(PrepareWeights("v", "6", 3))
    go.set()
    rig.updates.prepare_ended(rig.posted.get(timeout=10))
    assert failure_of(rig.updates.take_reports()).message == "no"
    rig.updates.prepare_ended(rig.posted.get(timeout=10))
    assert isinstance(rig.updates.take_reports()[0], Prepared)


def test_discard_of_what_is_prepared_says_nothing(rig: Rig) -> None:
    rig.prepare()
    rig.updates.discard(DiscardWeights("u"))
    assert rig.updates.take_reports() == []
    assert rig.store.prepared is None
    assert failure_of(rig.commit()).code == "weights_invalid"


def test_discard_while_draining_lets_everybody_go_on(rig: Rig) -> None:
    host = rig.host
    requests = [ask("a", 20, 30), ask("b", 20, 3)]
    host.add(requests[0])
    host.step(2)
    rig.prepare()
    rig.commit()
    host.add(requests[1])
    rig.updates.discard(DiscardWeights("u"))
    assert failure_of(rig.advance()).code == "weights_invalid"
    host.run()
    for request in requests:
        assert_same(host.ended[request.id], solo(request))
