"""Calls about trajectories, to a worker that follows a script."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from protocols import BadRequest, Continue, Duplicate, Limits, Overloaded, Ping, PromptTooLong, SubmitBatch, TurnDone
from rollout.client import RolloutClient, Trajectory, turn
from tests.rollout.client.fake_worker import FakeWorker

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]


def test_a_batch_carries_the_trainers_step(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    client.submit(client.group([1]), step=np.int64(7)).results()
    client.submit(client.group([1])).results()
    assert [message.step for message in worker.of(SubmitBatch)] == [7, None]
    with pytest.raises(BadRequest, match="step"):
        client.submit(client.group([1]), step=-1)


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
        (
            Limits(max_metadata=100),
            lambda c: [c.group([1], environment="e", config={"a": "x" * 200})],
            r"max_metadata, 100 \[groups\[0\]\.environment\.config\]",
        ),
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


def test_a_long_wait_for_weights_is_logged_once_and_says_for_which(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout.client.loop.LATE_S", 0.1)
    worker = start(hold=True, weight_version=6)
    client = connect(worker, timeout=0.4)  # which pings ten times a second
    batch = client.submit([client.group([1], n=2, min_version=7), client.group([1], min_version=6)], batch_id="b")
    pings = len(worker.of(Ping))
    worker.wait_for(lambda: len(worker.of(Ping)) >= pings + 5)
    lines = [record.getMessage() for record in caplog.records if "wait for weights" in record.getMessage()]
    assert lines == ["batch b: 2 wait for weights of version 7, the worker serves 6: update_weights, or cancel them"]
    assert "2 wait for weights of version 7" in repr(batch)
    worker.finish()
    assert len(batch.results()) == 3
    assert repr(batch) == "Batch('b', 3 of 3 ended)"


def test_an_answer_is_of_the_turn_that_it_answers(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    batch = client.submit(client.group([1, 2], environment="remote"))
    event = next(batch.events())
    assert isinstance(event, TurnDone)
    client.continue_(event, glue=[8], observation=np.array([9]), max_tokens=3, turn_reward=0.25)
    (answer,) = worker.of(Continue)
    assert (answer.trajectory_id, answer.turn, answer.expected_len) == (event.trajectory_id, 0, event.total_len)
    assert answer.glue is not None
    assert answer.observation is not None
    assert (answer.glue.tolist(), answer.observation.tolist(), answer.max_tokens) == ([8], [9], 3)
    assert (answer.turn_reward, answer.reward, answer.done) == (0.25, None, False)


@pytest.mark.parametrize("field", ["glue", "observation", "max_tokens"])
def test_an_answer_that_contradicts_itself_is_not_sent(start: Start, connect: Connect, field: str) -> None:
    worker = start()
    client = connect(worker)
    event = next(client.submit(client.group([1, 2], environment="remote")).events())
    assert isinstance(event, TurnDone)
    with pytest.raises(BadRequest) as caught:
        client.continue_(event, done=True, **{field: 3 if field == "max_tokens" else [3]})  # type: ignore[arg-type]
    assert caught.value.field == field
    with pytest.raises(BadRequest, match="done"):
        client.continue_(event, reward=1.0)
    assert not worker.of(Continue)


def test_every_option_of_a_submit_arrives(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    groups = [client.group([1]), client.group([2])]
    client.submit(
        groups, batch_id="b", step=4, groups_needed=1, min_complete=1, surplus="return", max_retries=2
    ).results()
    (sent,) = worker.of(SubmitBatch)
    assert (sent.batch_id, sent.step, sent.groups_needed, sent.min_complete) == ("b", 4, 1, 1)
    assert (sent.surplus, sent.max_retries, len(sent.groups), sent.resume) == ("return", 2, 2, ())


def test_one_group_may_stand_without_a_list_and_nothing_else_for_one(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    group = client.group([1])
    assert len(client.submit(group)) == 1
    for wrong, at in (([1, 2, 3], 0), ([group, {"prompt": [1]}], 1), ("ids", 0)):
        with pytest.raises(BadRequest, match="must be a Group") as caught:
            client.submit(wrong)  # type: ignore[arg-type]
        assert caught.value.field == f"groups[{at}]"
    kept = client.group([2], n=2)
    batch = client.submit(resume=kept)
    assert batch.submitted == (kept,)
    assert worker.of(SubmitBatch)[-1].resume == kept.trajectory_ids
