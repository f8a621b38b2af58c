"""Workers that restart: first the weights, then what is open, each result once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from protocols import (
    BadRequest,
    Cancel,
    CommitWeightsRequest,
    Continue,
    EngineDead,
    Ok,
    Overloaded,
    PrepareWeightsRequest,
    SubmitBatch,
    TurnDone,
    WeightsBusy,
    WeightsIncomplete,
    WeightsInvalid,
)
from rollout.client import RolloutClient, Trajectory
from tests.rollout.client.fake_worker import FakeWorker

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]
Later = Callable[..., Future[Any]]


def restart(worker: FakeWorker, start: Start, **options: Any) -> FakeWorker:
    worker.stop()
    return start(worker.address, boot_id="boot-2", **options)


def test_after_a_restart_weights_come_first_then_what_is_open(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    client.update_weights("/w/1", 1)
    groups = [client.group([1], n=3, seed=5), client.group([2], n=1)]
    batch = client.submit(groups, auto_ack=False, batch_id="b")
    worker.finish(groups[0].trajectory_ids[1], groups[1].trajectory_ids[0])
    early = [next(iter(batch))]
    worker = restart(worker, start)
    submit = worker.wait_for(lambda: worker.of(SubmitBatch))[0]
    assert worker.kinds() == ["hello", "prepare_weights", "commit_weights", "submit"]
    prepare, commit = worker.of(PrepareWeightsRequest)[0], worker.of(CommitWeightsRequest)[0]
    assert (prepare.path, prepare.version) == ("/w/1", 1)
    assert (commit.update_id, commit.version, commit.digest) == (prepare.update_id, 1, "digest-1")
    (part,) = submit.groups  # what has been received does not run again, yielded or not
    assert submit.batch_id == "b"
    assert part.trajectory_ids == (groups[0].trajectory_ids[0], groups[0].trajectory_ids[2])
    assert part.sample_indices == (0, 2)
    assert part.sampling == groups[0].sampling
    worker.finish()
    found = early + batch.results()
    assert sorted(t.trajectory_id for t in found) == sorted(n for g in groups for n in g.trajectory_ids)
    assert {t.trajectory_id: t.sample_index for t in found}[groups[0].trajectory_ids[2]] == 2


@pytest.mark.parametrize(("version", "digest"), [(1, "digest-1"), (2, "another client's")])
def test_weights_that_serve_already_are_not_loaded_again(
    start: Start, connect: Connect, version: int, digest: str
) -> None:
    worker = start(hold=True)
    client = connect(worker)
    client.update_weights("/w/1", 1)
    batch = client.submit(client.group([1]))
    worker = restart(worker, start, weight_version=version, weight_digest=digest)
    assert len(batch.results()) == 1
    assert worker.kinds() == ["hello", "submit"]


def test_a_client_that_set_no_weights_restores_none(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    batch = client.submit(client.group([1]))
    worker = restart(worker, start)
    assert len(batch.results()) == 1
    assert worker.kinds() == ["hello", "submit"]


def test_weights_that_cannot_be_restored_stop_the_work_until_new_ones(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    client.update_weights("/w/1", 1)
    batch = client.submit(client.group([1]))
    worker = restart(worker, start, refusals={PrepareWeightsRequest: WeightsInvalid("gone", field="path")})
    with pytest.raises(WeightsInvalid, match="gone"):
        batch.results()
    with pytest.raises(WeightsInvalid, match="gone"):
        client.submit(client.group([1]))
    assert not worker.of(SubmitBatch)
    del worker.answers[PrepareWeightsRequest]
    client.update_weights("/w/2", 2)
    assert len(batch.results()) == 1


def test_restoring_weights_waits_for_a_worker_that_is_busy(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    client.update_weights("/w/1", 1)
    batch = client.submit(client.group([1]))
    worker = restart(worker, start, refusals={PrepareWeightsRequest: WeightsBusy("another update")})
    worker.wait_for(lambda: worker.of(PrepareWeightsRequest))
    del worker.answers[PrepareWeightsRequest]
    assert len(batch.results()) == 1
    assert worker.kinds() == ["hello", "prepare_weights", "prepare_weights", "commit_weights", "submit"]


def test_restoring_begins_again_when_the_connection_breaks(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    client.update_weights("/w/1", 1)
    batch = client.submit(client.group([1]))
    worker = restart(worker, start, silent=[CommitWeightsRequest])
    worker.wait_for(lambda: worker.of(CommitWeightsRequest))
    worker.answers.clear()
    worker.cut()
    assert len(batch.results()) == 1
    once = ["hello", "prepare_weights", "commit_weights"]
    assert worker.kinds() == [*once, *once, "submit"]


def test_an_update_that_kills_every_worker_is_given_up(start: Start, connect: Connect, later: Later) -> None:
    def forgets_then_dies() -> Callable[[CommitWeightsRequest], None]:
        commits = itertools.count()

        def answer(_: CommitWeightsRequest) -> None:
            if next(commits) == 0:
                raise WeightsIncomplete("not prepared")

        return answer

    worker = start(silent=[CommitWeightsRequest])
    client = connect(worker)
    update = later(client.update_weights, "/w/1", 1)
    worker.wait_for(lambda: worker.of(CommitWeightsRequest))
    for boot in (2, 3):
        worker.stop()
        worker = start(worker.address, boot_id=f"boot-{boot}", answers={CommitWeightsRequest: forgets_then_dies()})
        worker.wait_for(lambda: len(worker.of(CommitWeightsRequest)) == 2)  # noqa: B023
    worker.stop()
    worker = start(worker.address, boot_id="boot-4")
    with pytest.raises(WeightsIncomplete):
        update.result(10)
    assert not worker.of(PrepareWeightsRequest)


def test_an_update_cut_by_a_restart_is_prepared_again(start: Start, connect: Connect, later: Later) -> None:
    worker = start()
    client = connect(worker)
    client.connect()
    worker.refuse(CommitWeightsRequest, None)
    update = later(client.update_weights, "/w/1", 1)
    worker.wait_for(lambda: worker.of(CommitWeightsRequest))
    worker = restart(worker, start)  # a worker refuses to commit what it has not prepared
    assert update.result(10).version == 1
    assert worker.kinds() == ["hello", "commit_weights", "prepare_weights", "commit_weights"]


def test_a_submit_that_was_not_yet_accepted_is_sent_once(start: Start, connect: Connect, later: Later) -> None:
    worker = start()
    client = connect(worker)
    client.connect()
    worker.refuse(SubmitBatch, None)
    result = later(lambda: client.submit(client.group([1], n=2)).results())
    worker.wait_for(lambda: worker.of(SubmitBatch))
    worker = restart(worker, start)
    assert len(result.result(10)) == 2
    assert worker.kinds() == ["hello", "submit"]


def test_open_work_waits_while_the_restarted_worker_is_full(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    batch = client.submit(client.group([1]))
    worker = restart(worker, start, refusals={SubmitBatch: Overloaded("full")})
    worker.wait_for(lambda: worker.of(SubmitBatch))
    del worker.answers[SubmitBatch]
    assert len(batch.results()) == 1


def test_open_work_that_is_refused_after_a_restart_raises(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    refused = client.submit(client.group([1]))
    refusal = BadRequest("no such environment", field="groups[0].environment.name")
    worker = restart(worker, start, refusals={SubmitBatch: refusal})
    with pytest.raises(BadRequest, match="no such environment"):
        refused.results()
    del worker.answers[SubmitBatch]
    assert len(client.submit(client.group([1])).results()) == 1


def test_work_refused_after_one_restart_may_be_accepted_after_the_next(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    batch = client.submit(client.group([1]))
    worker = restart(worker, start, refusals={SubmitBatch: EngineDead("out of memory")})
    with pytest.raises(EngineDead):
        batch.results()
    worker.stop()
    start(worker.address, boot_id="boot-3")
    client.ping()
    assert len(batch.results(timeout=10)) == 1


def test_a_submit_after_a_restart_that_gets_no_answer_is_repeated(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker, timeout=0.5)
    batch = client.submit(client.group([1]))
    worker = restart(worker, start, silent=[SubmitBatch])
    worker.wait_for(lambda: worker.of(SubmitBatch))
    worker.answers.clear()
    assert len(batch.results(timeout=10)) == 1


def test_remote_trajectories_start_again_and_old_answers_are_harmless(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    events = client.submit(client.group([1], environment="remote")).events()
    first = next(events)
    assert isinstance(first, TurnDone)
    client.continue_(first, observation=[5])
    second = next(events)
    assert isinstance(second, TurnDone)
    worker = restart(worker, start)
    again = next(events)
    assert isinstance(again, TurnDone)
    assert again.turn.index == 0
    client.continue_(second, observation=[5])  # would not fit: that trajectory has one turn now
    assert not worker.of(Continue)
    client.continue_(again, done=True)
    assert isinstance(next(events), Trajectory)
    assert next(events, None) is None


def test_an_answer_on_its_way_when_the_worker_restarts_is_dropped(start: Start, connect: Connect, later: Later) -> None:
    worker = start()
    client = connect(worker)
    events = client.submit(client.group([1], environment="remote")).events()
    turn = next(events)
    assert isinstance(turn, TurnDone)
    worker.refuse(Continue, None)
    answer = later(client.continue_, turn, observation=[5])
    worker.wait_for(lambda: worker.of(Continue))
    worker = restart(worker, start)
    answer.result(10)
    assert not worker.of(Continue)
    again = next(events)
    assert isinstance(again, TurnDone)
    assert again.turn.index == 0


def test_turns_nobody_saw_before_the_restart_are_not_shown(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    batch = client.submit(client.group([1], n=2, environment="remote"))
    client.ping()  # both turns have arrived
    worker = restart(worker, start)
    submit = worker.wait_for(lambda: worker.of(SubmitBatch))[0]
    client.ping()
    events = batch.events()
    turns = [next(events), next(events)]
    assert [turn.id for turn in turns if isinstance(turn, TurnDone)] == [submit.id] * 2


def test_what_was_cancelled_is_cancelled_again(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    batch = client.submit(group)
    worker.answers[Cancel] = lambda request: Ok(id=request.id)
    worker.cancels = False  # it ends before it comes to that
    client.cancel(trajectory_ids=[group.trajectory_ids[0]])
    worker = restart(worker, start, hold=True)
    worker.wait_for(lambda: worker.of(Cancel))
    worker.finish(group.trajectory_ids[1])
    assert [t.finish_reason for t in batch.results()] == ["abort_client", "stop"]


def test_a_batch_given_up_does_not_start_again(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    client.submit(group).close()
    kept = client.submit(client.group([1]))
    worker = restart(worker, start)
    assert len(kept.results()) == 1
    (submit,) = worker.of(SubmitBatch)
    assert not set(submit.groups[0].trajectory_ids) & set(group.trajectory_ids)
    client.submit(group).close()
