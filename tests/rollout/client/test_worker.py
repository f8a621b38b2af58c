"""Calls to the worker as a machine, to one that follows a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocols import BadRequest, Drain, Internal, Ok, Score, Scored, StatusRequest, Timeout
from rollout.client import RolloutClient, sampling
from tests.rollout.client.fake_worker import FakeWorker

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]


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


def test_scores_that_have_other_lengths_are_the_workers_fault(start: Start, connect: Connect) -> None:
    def short(request: Any) -> Scored:
        return Scored(id=request.id, weight_version=0, logprobs={"processed": (np.zeros(2, np.float32),)})

    client = connect(start(answers={Score: short}))
    with pytest.raises(Internal, match="processed logprobs"):
        client.score([[1, 2, 3]])
    assert len(client.score([[1, 2]]).logprobs["processed"][0]) == 2


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([],), "sequences"),
        (([1, 2],), "sequences[0]"),
        (([[1], []],), "sequences[1]"),
        (("text",), "sequences[0]"),
        (([[1.5]],), "sequences[0]"),
        (([[1, 2]], None, [[1]]), "sampled[0]"),
        (([[1, 2]], None, [[1, 2]]), "sampled[0]"),
        (([[1, 2]], None, []), "sampled"),
    ],
)
def test_what_cannot_be_scored_is_not_sent(start: Start, connect: Connect, arguments: Any, field: str) -> None:
    worker = start()
    sequences, law, sampled = (*arguments, None, None)[:3]
    with pytest.raises(BadRequest) as caught:
        connect(worker).score(sequences, law, sampled=sampled)
    assert caught.value.field == field
    assert not worker.of(Score)


def test_a_drain_may_take_its_time_and_the_calls_too(start: Start, connect: Connect) -> None:
    client = connect(start(silent=[Drain]))
    with pytest.raises(Timeout, match=r"Drain .* in 0\.3 s"):
        client.drain(0.2, timeout=0.1)


def test_a_reply_of_another_kind_is_the_workers_fault(start: Start, connect: Connect) -> None:
    client = connect(start(answers={StatusRequest: lambda request: Ok(id=request.id)}))
    with pytest.raises(Internal, match="'ok', not WorkerStatus"):
        client.status()
    assert client.ping().boot_id == "boot-1"


def test_the_first_call_waits_for_a_worker_and_later_ones_know_it(start: Start, connect: Connect) -> None:
    worker = start(weight_version=3)
    client = connect(worker)
    assert client.connect() is client.connect(timeout=0.001)
    assert worker.kinds() == ["hello"]
