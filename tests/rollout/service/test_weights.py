from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.handle import CommitWeights, DiscardWeights, PrepareWeights
from protocols.errors import BadRequest, WeightsBusy, WeightsInvalid
from protocols.requests import AbortWeightsRequest, CommitWeightsRequest, PrepareWeightsRequest
from rollout.generation.async_engine import AsyncEngine
from rollout.metrics.observer import Observer
from rollout.service.weights import WeightUpdates
from tests.rollout.raw_client import RawClient, group
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.workers import eventually, on_loop, worker


@asynccontextmanager
async def updates(engine: TimedEngine, version: int = 0) -> AsyncIterator[WeightUpdates]:
    face = AsyncEngine(engine)
    await face.start()
    yield WeightUpdates(face, version=version, digest="start", on_commit=lambda: None, observer=Observer())
    await face.close(5)


def prepare(name: str = "u", version: int = 1, **fields: Any) -> PrepareWeightsRequest:
    return PrepareWeightsRequest(**{"id": "p", "update_id": name, "path": f"{name}.d", "version": version, **fields})


def commit(name: str = "u", version: int = 1, **fields: Any) -> CommitWeightsRequest:
    return CommitWeightsRequest(**{"id": "c", "update_id": name, "version": version, "drain_timeout_s": 5.0, **fields})


def commands(engine: TimedEngine, kind: type) -> int:
    return sum(isinstance(command, kind) for command in engine.seen)


@on_loop
async def test_prepare_then_commit_then_a_retry_that_changes_nothing() -> None:
    engine = TimedEngine()
    async with updates(engine) as weights:
        prepared = await weights.prepare(prepare(), "s")
        assert (prepared.version, prepared.digest, prepared.update_id) == (1, "stub:u.d", "u")
        assert weights.version == 0
        done = await weights.commit(commit(digest=prepared.digest))
        assert (done.version, done.digest) == (weights.version, weights.digest) == (1, "stub:u.d")
        again = await weights.commit(commit(id="other"))
        assert again == done.model_copy(update={"id": "other"})
        assert commands(engine, CommitWeights) == 1
        with pytest.raises(WeightsInvalid, match="was committed as"):
            await weights.commit(commit(digest="wrong"))
        with pytest.raises(WeightsInvalid, match="other content"):
            await weights.prepare(prepare(path="other.d"), "s")
        assert commands(engine, PrepareWeights) == 1


@on_loop
async def test_all_of_an_update_again_leaves_nothing_that_is_in_others_way() -> None:
    engine = TimedEngine()
    async with updates(engine) as weights:
        for _ in range(2):
            prepared = await weights.prepare(prepare(), "s")
            done = await weights.commit(commit(digest=prepared.digest))
            assert (done.version, done.digest) == (1, prepared.digest)
        assert commands(engine, PrepareWeights) == commands(engine, CommitWeights) == 1
        await weights.prepare(prepare("two", 2), "t")


@on_loop
async def test_retries_join_what_is_under_way() -> None:
    engine = TimedEngine(prepare_s=0.1)
    async with updates(engine) as weights:
        both = await asyncio.gather(weights.prepare(prepare(id="1"), "s"), weights.prepare(prepare(id="2"), "s"))
        assert [reply.id for reply in both] == ["1", "2"]
        assert commands(engine, PrepareWeights) == 1
        await asyncio.gather(weights.commit(commit(id="3")), weights.commit(commit(id="4")))
        assert commands(engine, CommitWeights) == 1


@on_loop
async def test_one_update_at_a_time_and_the_refusal_names_it() -> None:
    engine = TimedEngine(prepare_s=0.1)
    async with updates(engine) as weights:
        first = asyncio.create_task(weights.prepare(prepare("one"), "s"))
        with pytest.raises(WeightsBusy, match="one"):
            await weights.prepare(prepare("two", 2), "s")
        with pytest.raises(WeightsBusy, match="still being prepared"):
            await weights.commit(commit("one"))
        await first
        with pytest.raises(WeightsBusy, match="another session"):
            await weights.prepare(prepare("two", 2), "t")
        with pytest.raises(WeightsBusy, match="other content"):
            await weights.prepare(prepare("one", 2), "s")
        assert (await weights.commit(commit("one"))).version == 1
        await weights.prepare(prepare("two", 2), "t")
        assert (await weights.commit(commit("two", 2))).version == 2


@on_loop
async def test_the_same_session_may_replace_an_update_it_never_committed() -> None:
    engine = TimedEngine()
    async with updates(engine) as weights:
        await weights.prepare(prepare("one"), "s")
        await weights.prepare(prepare("two", 2), "s")
        assert commands(engine, DiscardWeights) == 1
        with pytest.raises(BadRequest, match="no update 'one'"):
            await weights.commit(commit("one"))
        assert (await weights.commit(commit("two", 2))).version == 2


@on_loop
async def test_an_update_of_a_session_that_is_gone_blocks_nobody() -> None:
    engine = TimedEngine()
    async with updates(engine) as weights:
        await weights.prepare(prepare("one"), "s")
        weights.forget("other")
        with pytest.raises(WeightsBusy):
            await weights.prepare(prepare("two"), "t")
        weights.forget("s")
        await weights.prepare(prepare("two"), "t")


@on_loop
async def test_a_version_goes_back_by_force_only() -> None:
    async with updates(TimedEngine(), version=5) as weights:
        with pytest.raises(BadRequest, match="force") as caught:
            await weights.prepare(prepare(version=4), "s")
        assert caught.value.field == "version"
        await weights.prepare(prepare(version=4, force=True), "s")
        assert (await weights.commit(commit(version=4))).version == weights.version == 4


@on_loop
async def test_a_commit_says_what_it_means() -> None:
    async with updates(TimedEngine()) as weights:
        with pytest.raises(BadRequest, match="no update"):
            await weights.commit(commit())
        await weights.prepare(prepare(), "s")
        for wrong, kind, field in (
            ({"version": 2}, BadRequest, "version"),
            ({"digest": "x"}, WeightsInvalid, "digest"),
            ({"mode": "keep_kv"}, BadRequest, "mode"),
            ({"mode": "recompute_kv"}, BadRequest, "mode"),
        ):
            with pytest.raises(kind) as caught:
                await weights.commit(commit(**wrong))
            assert caught.value.field == field
        assert (await weights.commit(commit())).version == 1


@on_loop
async def test_weights_that_are_refused_leave_the_old_ones_and_room_for_the_next() -> None:
    async with updates(TimedEngine()) as weights:
        for _ in range(2):
            with pytest.raises(WeightsInvalid, match="expected another shape"):
                await weights.prepare(prepare("bad"), "s")
        assert (weights.version, weights.digest) == (0, "start")
        await weights.prepare(prepare("good"), "t")
        assert (await weights.commit(commit("good"))).version == 1


@on_loop
async def test_abort_forgets_what_is_prepared_and_what_is_being_prepared() -> None:
    engine = TimedEngine(prepare_s=0.1)
    async with updates(engine) as weights:
        assert not weights.abort(AbortWeightsRequest(id="a", update_id="u"))
        await weights.prepare(prepare(), "s")
        assert weights.abort(AbortWeightsRequest(id="a", update_id="u"))
        with pytest.raises(BadRequest):
            await weights.commit(commit())
        running = asyncio.create_task(weights.prepare(prepare("v"), "s"))
        assert weights.abort(AbortWeightsRequest(id="a", update_id="v"))
        with pytest.raises(WeightsInvalid, match="aborted"):
            await running


@on_loop
async def test_a_caller_that_goes_away_stops_nothing() -> None:
    async with updates(TimedEngine(prepare_s=0.1)) as weights:
        caller = asyncio.create_task(weights.prepare(prepare(), "s"))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert (await weights.prepare(prepare(id="again"), "s")).id == "again"


# Over the wire, with work running.


def update(client: RawClient, version: int, **fields: Any) -> dict[str, Any]:
    name = f"u{version}"
    prepared = client.call("prepare_weights", update_id=name, path=f"w{version}", version=version)
    assert prepared["type"] == "weights_prepared", prepared
    fields.setdefault("drain_timeout_s", 5.0)
    return client.call("commit_weights", update_id=name, version=version, digest=prepared["digest"], **fields)


def versions(record: dict[str, Any]) -> list[list[int]]:
    runs: list[list[int]] = record["segments"][0]["weight_versions"].tolist()
    return runs


def test_drain_lets_running_turns_end_and_starts_none() -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as client:
        client.hello()
        client.call("submit", batch_id="b", groups=[group("old", max_tokens=30)])
        eventually(lambda: len(served.engine.live) == 1)
        prepared = client.call("prepare_weights", update_id="u", path="w", version=1)
        commit_id = client.send("commit_weights", update_id="u", version=1, drain_timeout_s=5.0)
        client.call("submit", batch_id="c", groups=[group("new", max_tokens=1)])
        assert client.call("status")["state"] == "updating"
        done = client.reply(commit_id)
        assert (done["type"], done["digest"]) == ("weights_committed", prepared["digest"])
        assert [(record["group_id"], versions(record)) for record in (client.record(), client.record())] == [
            ("old", [[0, 30]]),
            ("new", [[1, 1]]),
        ]
        status = client.call("status")
        assert (status["state"], status["weight_version"], status["weight_digest"]) == ("ready", 1, done["digest"])


def test_abort_ends_running_turns_as_partials() -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as client:
        client.hello()
        client.call("submit", batch_id="b", groups=[group(max_tokens=10_000)])
        eventually(lambda: len(served.engine.live) == 1)
        assert update(client, 1, mode="abort")["version"] == 1
        record = client.record()
        assert record["segments"][0]["turns"][-1]["finish_reason"] == "abort_weight_update"
        assert (record["status"], record["finish_reason"]) == ("aborted", "abort_weight_update")


@pytest.mark.parametrize(("at_timeout", "outcome"), [("abort", "weights_committed"), ("fail", "error")])
def test_a_drain_that_takes_too_long_aborts_or_fails_as_asked(at_timeout: str, outcome: str) -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as client:
        client.hello()
        client.call("submit", batch_id="b", groups=[group(max_tokens=100)])
        eventually(lambda: len(served.engine.live) == 1)
        reply = update(client, 1, drain_timeout_s=0.1, on_drain_timeout=at_timeout)
        assert reply["type"] == outcome
        record = client.record()
        if outcome == "error":
            assert reply["error"]["code"] == "weights_busy"
            assert versions(record) == [[0, 100]]
            # The update stays prepared: the commit can be tried again.
            again = client.call("commit_weights", update_id="u1", version=1, drain_timeout_s=5.0)
            assert again["type"] == "weights_committed"
        else:
            assert record["status"] == "aborted"


def test_a_trajectory_between_turns_never_delays_a_commit() -> None:
    remote = {"environment": {"name": "remote"}, "budget": {"on_length": "continue"}}
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        client.call("submit", batch_id="b", groups=[group(max_tokens=2, **remote)])
        turn = client.event("turn_done")
        before = time.monotonic()
        assert update(client, 1, drain_timeout_s=60.0)["type"] == "weights_committed"
        assert time.monotonic() - before < 30
        client.call("continue", trajectory_id="g.0", turn=0, expected_len=turn["total_len"])
        second = client.event("turn_done")
        client.call("continue", trajectory_id="g.0", turn=1, expected_len=second["total_len"], done=True)
        assert versions(client.record()) == [[0, 2], [1, 2]]


def test_a_reply_lost_with_its_connection_is_answered_on_the_next() -> None:
    with worker(TimedEngine(prepare_s=0.2)) as served:
        with RawClient(served.address) as client:
            token = client.hello()["session"]
            client.send("prepare_weights", update_id="u", path="w", version=1)
            client.call("ping")
        with RawClient(served.address) as client:
            client.hello(session=token)
            assert client.call("prepare_weights", update_id="u", path="w", version=1)["type"] == "weights_prepared"
            first = client.call("commit_weights", update_id="u", version=1, mode="abort")
            second = client.call("commit_weights", update_id="u", version=1, mode="abort")
            assert first["type"] == second["type"] == "weights_committed"
        assert commands(served.engine, PrepareWeights) == commands(served.engine, CommitWeights) == 1


def test_drain_without_a_timeout_is_refused_by_name() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        error = client.call("commit_weights", update_id="u", version=1)["error"]
        assert (error["code"], error["field"]) == ("bad_request", "drain_timeout_s")


def test_a_commit_waits_for_work_while_everything_else_is_answered() -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as client:
        client.hello()
        client.call("submit", batch_id="b", groups=[group(max_tokens=50)])
        eventually(lambda: len(served.engine.live) == 1)
        client.call("prepare_weights", update_id="u", path="w", version=1)
        commit_id = client.send("commit_weights", update_id="u", version=1, drain_timeout_s=5.0)
        assert client.call("abort_weights", update_id="u")["error"]["code"] == "weights_busy"
        assert client.call("ping")["weight_version"] == 0
        assert client.reply(commit_id)["type"] == "weights_committed"
        assert client.call("abort_weights", update_id="u")["detail"] == {"aborted": 0}
