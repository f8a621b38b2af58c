"""Calls that make new weights serve, to a worker that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from protocols import (
    AbortWeightsRequest,
    BadRequest,
    CommitWeightsRequest,
    PrepareWeightsRequest,
    Timeout,
    WeightsBusy,
    WeightsIncomplete,
    WeightsInvalid,
)
from rollout.client import AsyncRolloutClient, RolloutClient
from tests.rollout.client.fake_worker import FakeWorker

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]


def test_a_relative_path_of_weights_starts_at_the_trainer(
    start: Start, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = start()
    connect(worker).update_weights("w1", 1)
    assert [request.path for request in worker.of(PrepareWeightsRequest)] == [str(tmp_path / "w1")]


def test_update_weights_prepares_then_commits_what_it_prepared(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    done = client.update_weights("/w/1", 1, drain_timeout=5, on_timeout="fail", checksums={"a": "sha256:0"})
    assert (done.version, done.digest, done.load_s, done.paused_s, done.bytes) == (1, "digest-1", 0.25, 0.125, 10)
    prepare, commit = worker.of(PrepareWeightsRequest)[0], worker.of(CommitWeightsRequest)[0]
    assert (prepare.path, prepare.version, prepare.checksums) == ("/w/1", 1, {"a": "sha256:0"})
    assert commit.update_id == prepare.update_id == done.update_id
    assert (commit.digest, commit.mode, commit.drain_timeout_s, commit.on_drain_timeout) == (
        "digest-1",
        "drain",
        5,
        "fail",
    )


def test_a_failed_commit_frees_what_was_prepared(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    worker.refuse(CommitWeightsRequest, WeightsInvalid("digest differs", field="digest"))
    with pytest.raises(WeightsInvalid):
        client.update_weights("/w/1", 1, digest="other", mode="abort")
    assert worker.of(CommitWeightsRequest)[0].digest == "other"
    worker.wait_for(lambda: worker.of(AbortWeightsRequest))


def test_weights_in_three_calls(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    prepared = client.prepare_weights("/w/2", 2, update_id="u", force=True)
    assert worker.of(PrepareWeightsRequest)[0].force
    assert client.commit_weights(prepared, mode="abort").version == 2
    client.abort_weights(prepared)
    client.abort_weights("u2")
    assert [request.update_id for request in worker.of(AbortWeightsRequest)] == ["u", "u2"]


def test_only_a_drain_is_given_time_for_it(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    client.update_weights("/w/1", 1, mode="abort", drain_timeout=5)
    client.update_weights("/w/2", 2)
    assert [(commit.mode, commit.drain_timeout_s) for commit in worker.of(CommitWeightsRequest)] == [
        ("abort", None),
        ("drain", 60.0),
    ]


def test_the_drain_comes_on_top_of_the_timeout(start: Start, connect: Connect) -> None:
    worker = start(silent=[CommitWeightsRequest])
    client = connect(worker)
    prepared = client.prepare_weights("/w/1", 1)
    for options, waited in (({"drain_timeout": 0.3}, "0.4"), ({"drain_timeout": 9, "mode": "abort"}, "0.1")):
        with pytest.raises(Timeout, match=f"CommitWeightsRequest .* in {waited} s"):
            client.commit_weights(prepared, timeout=0.1, **options)  # type: ignore[arg-type]


def test_an_update_has_one_id_of_its_own_unless_one_is_given(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    ids = {client.update_weights("/w/1", 1).update_id, client.prepare_weights("/w/1", 2).update_id}
    assert len(ids) == 2
    assert client.prepare_weights("/w/1", 3, update_id="mine").update_id == "mine"


def test_what_was_never_prepared_is_the_workers_to_refuse(start: Start, connect: Connect) -> None:
    client = connect(start())
    prepared = client.prepare_weights("/w/1", 1)
    with pytest.raises(WeightsIncomplete, match="update_id"):
        client.commit_weights(prepared.model_copy(update={"update_id": "other"}))


@pytest.mark.parametrize("path", [None, 3, ["/w/1"], b"/w/1"])
def test_a_path_is_text_or_a_path(start: Start, connect: Connect, path: Any) -> None:
    worker = start()
    with pytest.raises(BadRequest, match="push_weights") as caught:
        connect(worker).update_weights(path, 1)
    assert caught.value.field == "path"
    with pytest.raises(BadRequest, match=r"must not be empty \[path\]"):
        connect(worker).update_weights("", 1)  # as an unset variable gives it: the working directory
    assert not worker.of(PrepareWeightsRequest)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mode": "drop"}, "mode"),
        ({"on_timeout": "wait"}, "on_timeout"),
        ({"digest": 3}, "digest"),
        ({"drain_timeout": 0}, "drain_timeout"),
    ],
)
def test_a_commit_that_is_wrong_is_not_sent(
    start: Start, connect: Connect, options: dict[str, Any], field: str
) -> None:
    worker = start()
    client = connect(worker)
    with pytest.raises(BadRequest) as caught:
        client.commit_weights(client.prepare_weights("/w/1", 1), **options)
    assert caught.value.field == field
    assert not worker.of(CommitWeightsRequest)


@pytest.mark.parametrize("options", [{"mode": "drop"}, {"on_timeout": "wait"}, {"drain_timeout": 0}, {"timeout": "1"}])
def test_what_is_wrong_with_the_commit_is_said_before_anything_is_written_or_read(
    start: Start, connect: Connect, options: dict[str, Any]
) -> None:
    worker, made = start(), []
    client = connect(worker)
    tensors = (made.append(name) for name in ("model.norm.weight",))
    for call in (
        lambda: client.update_weights("/w/1", 1, **options),
        lambda: client.push_weights(tensors, 1, **options),
    ):  # type: ignore[arg-type]
        with pytest.raises(BadRequest) as caught:
            call()
        assert caught.value.field in options
    assert not made
    assert not worker.of(PrepareWeightsRequest)


def test_a_second_update_at_once_is_refused_and_takes_nothing_from_the_first(
    start: Start, connect: Connect, later: Callable[..., Future[Any]]
) -> None:
    worker = start(silent=[CommitWeightsRequest])
    client = connect(worker)
    first = later(client.update_weights, "/w/1", 1, timeout=3.0, mode="abort")
    worker.wait_for(lambda: worker.of(CommitWeightsRequest))
    with pytest.raises(WeightsBusy, match="of this client"):
        client.update_weights("/w/2", 2)
    assert [request.path for request in worker.of(PrepareWeightsRequest)] == ["/w/1"]
    with pytest.raises(Timeout):
        first.result(10)
    assert client.prepare_weights("/w/2", 2).version == 2
    with pytest.raises(Timeout):
        client.update_weights("/w/2", 2, timeout=0.1, mode="abort")


def test_an_update_that_is_given_up_while_it_is_read_blocks_no_other(start: Start, connect: Connect) -> None:
    worker = start(silent=[PrepareWeightsRequest])
    client = connect(worker)
    with pytest.raises(Timeout, match="PrepareWeightsRequest"):
        client.update_weights("/w/1", 1, timeout=0.1)
    worker.wait_for(lambda: worker.of(AbortWeightsRequest))
    assert worker.of(AbortWeightsRequest)[0].update_id == worker.of(PrepareWeightsRequest)[0].update_id


def test_an_update_that_is_cancelled_while_it_is_read_blocks_no_other(start: Start) -> None:
    worker = start(silent=[PrepareWeightsRequest])

    async def main() -> None:
        async with AsyncRolloutClient(worker.address, timeout=10.0) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.update_weights("/w/1", 1), 0.3)
            await asyncio.to_thread(worker.wait_for, lambda: worker.of(AbortWeightsRequest))

    asyncio.run(main())
    assert worker.of(AbortWeightsRequest)[0].update_id == worker.of(PrepareWeightsRequest)[0].update_id
