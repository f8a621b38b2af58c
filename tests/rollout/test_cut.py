"""Groups and tails: batches that have enough, what becomes of the rest, and how it goes on."""

from __future__ import annotations

import asyncio
import functools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import pytest

from engine.handle import Abort, Command, Ping, Report
from engine.request import Request
from protocols.codec import encode
from protocols.errors import BadRequest, Duplicate, UnknownTrajectory
from protocols.fields import SOURCE_SAMPLED, Group, Limits, Partial, Record, Sampling
from protocols.replies import BatchDone
from protocols.requests import SubmitBatch
from rollout.batches.submitted import INDEX_STRIDE
from rollout.client import RolloutClient, Trajectory, TurnDone
from rollout.environments.base import Environment, Step, TurnResult
from rollout.metrics.observer import Observer, Round
from rollout.service.service import Service, Timeouts
from tests.rollout.batches.test_batches import submit, untouched
from tests.rollout.raw_client import RawClient
from tests.rollout.raw_client import group as raw_group
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.workers import WorkerThread, eventually, on_loop, served, soon, worker

PROMPT = [1, 2, 3]
HERE = "tests.rollout.test_cut"


def is_slow(trajectory_id: str) -> bool:
    """One in ten."""
    return zlib.crc32(trajectory_id.encode()) % 10 == 0


class Stepped(TimedEngine):
    """A step gives one token to everybody; whoever `is_slow` needs `TIMES` as many of them as the others."""

    TIMES = 20

    def start(self, deliver: Callable[[Report], None]) -> None:
        self._deliver = deliver
        self._left: dict[str, int] = {}

    def send(self, command: Command) -> None:
        self._take(command)
        self._report()

    def close(self, timeout: float) -> bool:
        return timeout > 0

    def _schedule(self, request: Request) -> None:
        self._left[request.id] = request.max_tokens * (self.TIMES if is_slow(request.trajectory.split("/")[1]) else 1)

    def step(self) -> None:
        for name in self.live:
            self._left[name] -= 1
        for name in [name for name in self.live if not self._left[name]]:
            self._end(name, "length")
        self._report()


class Named(TimedEngine):
    """Takes a second for each token of trajectories with "slow" in their id, and no time for others."""

    def _seconds(self, request: Request) -> float:
        return super()._seconds(request) if "slow" in request.id.split("/")[1] else 0.0


@contextmanager
def pair(engine: TimedEngine, **options: Any) -> Iterator[tuple[WorkerThread, RolloutClient]]:
    with worker(engine, **options) as thread, RolloutClient(thread.address) as client:
        yield thread, client


def group(client: RolloutClient, *names: str, name: str = "g", tokens: int = 50, **fields: Any) -> Group:
    return client.group(
        PROMPT, len(names), id=name, trajectory_ids=names, max_tokens=tokens, ignore_eos=True, seed=7, **fields
    )


def whole(trajectory: Trajectory, tokens: int = 50) -> bool:
    """Is it as if it had never been cut?"""
    segment = trajectory.segment
    ids, scored = segment.token_ids[len(PROMPT) :], segment.logprobs[len(PROMPT) :]
    assert len(ids) == len(scored) == len(segment.loss_mask) - len(PROMPT)
    return len(ids) == tokens and bool(segment.loss_mask[len(PROMPT) :].all()) and bool((scored < 0).all())


# Enough.


class Nowhere:
    """A channel whose peer takes everything."""

    rx_bytes = tx_bytes = 0

    def send(self, peer: bytes, frames: list[bytes | memoryview]) -> bool:
        return bool(peer and frames)


async def steps(**wanted: Any) -> tuple[int, list[Record], BatchDone]:
    """Steps until a batch has ended of 64 groups of 8 samples of 10 tokens; its records; what was said of it."""
    engine = Stepped(1.0)
    service = Service(
        Nowhere(), engine, served(), limits=Limits(), timeouts=Timeouts(), at_once=1024, max_waiting=65536
    )  # type: ignore[arg-type]
    await service.engine.start()
    session = service.sessions.greet(b"peer", "client", None)[0].session
    groups = [
        Group(
            id=f"g{i}",
            prompt=np.array(PROMPT, np.int32),
            trajectory_ids=[f"{i}.{j}" for j in range(8)],
            sampling=Sampling(max_tokens=10),
        )
        for i in range(64)
    ]
    service.batches.accept(session, SubmitBatch(id="s", batch_id="b", groups=groups, **wanted))
    service.runs.admit()
    batch, count = session.batches["b"], 0
    await soon(lambda: len(engine.live) == 512)
    while batch.count.open:
        engine.step()
        count += 1
        # What is surplus ends without a further step.
        await soon(
            lambda: service.runs.admission.running == len(engine.live) and not (batch.satisfied and batch.count.open)
        )
    records = [member.record for member in session.trajectories.values() if member.record is not None]
    return count, records, batch.done().message()  # type: ignore[return-value]


@on_loop
async def test_a_batch_of_which_enough_is_asked_ends_long_before_its_tail() -> None:
    late, everything, _ = await steps()
    early, ended, done = await steps(groups_needed=48, min_complete=6)
    assert (late, len(everything)) == (200, 512)
    assert early < 0.4 * late
    per_group = Counter(record.group_id for record in ended)
    assert sum(count >= 6 for count in per_group.values()) >= 48
    assert len(ended) + len(done.kept) == 512
    assert done.cut == len(done.kept)
    for record in (*ended, *everything):
        (segment,) = record.segments
        assert record.finish_reason == "length"
        assert {len(segment.token_ids), len(segment.logprobs), len(segment.loss_mask)} == {13}
        assert segment.loss_mask.sum() == 10


def test_what_is_not_needed_comes_back_as_it_is_and_everything_is_said() -> None:
    with worker(Named(1.0)) as served, RawClient(served.address) as client:
        assert {"early_cut", "resume"} <= set(client.hello()["capabilities"])
        whole_, cut = raw_group("g", n=2), raw_group("h", n=1, max_tokens=100)
        cut["trajectory_ids"] = ["slow.0"]
        submit(client, whole_, cut, groups_needed=1, surplus="return")
        records = {(record := client.record())["trajectory_id"]: record for _ in range(3)}
        assert records["slow.0"]["finish_reason"] == "abort_surplus"
        assert records["slow.0"]["partial"] is not None
        groups = {(done := client.event("group_done"))["group_id"]: done for _ in range(2)}
        assert (groups["g"]["complete"], groups["g"]["short"]) == (True, False)
        assert (groups["h"]["complete"], groups["h"]["short"]) == (False, True)
        done = client.event("batch_done")
        assert (done["counts"], done["cut"], done["kept"]) == ({"truncated": 2, "aborted": 1}, 1, [])
        eventually(lambda: untouched(served))


class Told(Observer):
    """Trajectories by how they were told to have ended."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}

    def trajectory_ended(self, batch: Round, record: Record, version: int) -> None:  # noqa: ARG002
        self.ended[record.trajectory_id] = record.finish_reason


def test_what_is_kept_has_no_record_and_batch_done_names_it() -> None:
    told = Told()
    with worker(Named(0.05), observer=told) as served, RawClient(served.address) as client:
        client.hello()
        mixed = raw_group("g", n=3, max_tokens=100) | {"trajectory_ids": ["a", "b", "slow"]}
        submit(client, mixed, min_complete=2)
        assert {client.record()["trajectory_id"] for _ in range(2)} == {"a", "b"}
        done = client.event("group_done")
        assert (done["complete"], done["short"], done["kept"], done["counts"]) == (True, False, 1, {"truncated": 2})
        done = client.event("batch_done")
        assert (done["kept"], done["cut"]) == (["slow"], 1)
        assert told.ended == {"a": "length", "b": "length", "slow": "abort_surplus"}
        admission = served.service.runs.admission
        assert (admission.kept, admission.running) == (1, 0)
        assert 0 < admission.kept_bytes < 10_000
        assert served.service.runs.idle.is_set()
        # Its id is not free, and cancelling it leaves nothing behind, not even a record.
        again = raw_group("x") | {"trajectory_ids": ["slow"]}
        assert submit(client, again, batch="c")["error"]["code"] == "duplicate"
        assert client.call("cancel", trajectory_ids=["slow"])["detail"]["cancelled"] == 1
        eventually(lambda: untouched(served))
        assert client.nothing(0.1)


@pytest.mark.parametrize("surplus", ["keep", "return"])
def test_what_had_not_begun_is_surplus_too(surplus: str) -> None:
    with pair(Named(0.05), at_once=1) as (thread, client):
        batch = client.submit(
            [group(client, "a", name="g", priority=1), group(client, "slow", "b", name="h")],
            groups_needed=1,
            surplus=surplus,  # type: ignore[arg-type]
        )
        ended = {t.trajectory_id: t for t in batch}
        again = client.submit(resume=[*batch.kept, *(t for t in ended.values() if t.resumable)])
        assert {t.trajectory_id for t in again if whole(t)} == {"slow", "b"}
        assert ended["a"].ok
        eventually(lambda: untouched(thread))


@pytest.mark.parametrize(("surplus", "ended"), [("keep", []), ("return", ["abort_surplus"] * 2)])
def test_of_a_batch_that_needs_no_group_everything_is_surplus(surplus: str, ended: list[str]) -> None:
    with pair(Named(0.05)) as (thread, client):
        batch = client.submit(group(client, "a", "b"), groups_needed=0, surplus=surplus)  # type: ignore[arg-type]
        assert [t.finish_reason for t in batch] == ended
        assert sum(len(kept.trajectory_ids) for kept in batch.kept) == 2 - len(ended)
        client.cancel(trajectory_ids=["a", "b"])
        eventually(lambda: untouched(thread))


def test_a_batch_that_cannot_have_enough_still_ends_and_says_what_is_short() -> None:
    with worker(Named(0.05)) as served, RawClient(served.address) as client:
        client.hello()
        bad = raw_group("bad", n=2, max_tokens=1000) | {"trajectory_ids": ["slow.0", "slow.1"]}
        submit(client, bad, raw_group("good", n=2), groups_needed=2, min_complete=2)
        eventually(lambda: len(served.engine.live) == 2)
        client.call("cancel", trajectory_ids=["slow.0", "slow.1"])
        statuses = {(record := client.record())["trajectory_id"]: record["status"] for _ in range(4)}
        assert statuses == {"slow.0": "aborted", "slow.1": "aborted", "good.0": "truncated", "good.1": "truncated"}
        groups = {(done := client.event("group_done"))["group_id"]: done for _ in range(2)}
        assert (groups["bad"]["short"], groups["good"]["short"]) == (True, False)
        assert client.event("batch_done")["counts"] == {"aborted": 2, "truncated": 2}


def test_what_cannot_be_enough_is_refused_by_name() -> None:
    with pair(TimedEngine()) as (_, client):
        for fields, field in (
            ({"groups_needed": 2}, "groups_needed"),
            ({"min_complete": 3}, "min_complete"),
            ({"max_retries": -1}, "max_retries"),
        ):
            with pytest.raises(BadRequest) as caught:
                client.submit(group(client, "a", "b"), **fields)
            assert caught.value.field == field
        with pytest.raises(UnknownTrajectory) as unknown:
            client.submit(resume=[group(client, "nobody")])
        assert unknown.value.field == "resume[0]"


def test_a_repeat_that_is_to_end_otherwise_is_a_duplicate() -> None:
    with worker(TimedEngine(0.05)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, raw_group(n=2, max_tokens=100), min_complete=2)
        assert submit(client, raw_group(n=2, max_tokens=100), min_complete=2)["known"] == 2
        refused = submit(client, raw_group(n=2, max_tokens=100), min_complete=1)
        assert (refused["error"]["code"], refused["error"]["field"]) == ("duplicate", "min_complete")


# Kept, and gone on with.


@pytest.mark.parametrize("surplus", ["keep", "return"])
def test_what_was_cut_in_a_turn_goes_on_and_is_as_if_it_had_not_been(surplus: str) -> None:
    script = [[5, 6]]
    with pair(Named(0.01)) as (thread, client):
        groups = [
            group(client, "a", name="g", script=script),
            group(client, "slow.0", "slow.1", name="h", script=script),
        ]
        first = client.submit(groups, groups_needed=1, surplus=surplus)  # type: ignore[arg-type]
        records = list(first)
        assert len(records) == (1 if surplus == "keep" else 3)
        cut = [t for t in records if t.resumable]
        assert all(t.finish_reason == "abort_surplus" and not t.ok for t in cut)
        resumed = client.submit(resume=[*first.kept, *cut]).results()
        assert [t.trajectory_id for t in resumed] == ["slow.0", "slow.1"]
        for t in resumed:
            assert [turn.length for turn in t.turns] == [50, 50]
            assert [turn.index for turn in t.turns] == [0, 1]
            np.testing.assert_array_equal(t.token_ids[53:55], [5, 6])
            assert t.sampling.seed == 7
            assert t.truncation is not None
            assert sum(t.times.model_dump().values()) == pytest.approx(t.wall_s, rel=0.01)
            assert t.weight_versions.tolist() == [[0, 100]]
        eventually(lambda: untouched(thread))


def test_what_goes_on_in_the_batch_that_had_enough_is_counted_once() -> None:
    """It is kept again at once; its group has as many samples, and as many of them kept, as before."""
    with worker(Named(0.05)) as thread, RawClient(thread.address) as client:
        client.hello()
        slow = raw_group("slow", n=2, max_tokens=100)
        submit(client, raw_group("quick"), slow, groups_needed=1)
        assert client.event("batch_done")["kept"] == ["slow.0", "slow.1"]
        assert client.call("submit", batch_id="b", groups=[], resume=["slow.0"], groups_needed=1)["type"] == "accepted"
        assert client.event("batch_done")["kept"] == ["slow.1", "slow.0"]
        groups = [client.event("group_done") for _ in range(3)]
        assert [(done["group_id"], done["kept"]) for done in groups] == [("quick", 0), ("slow", 2), ("slow", 2)]
        client.call("cancel", trajectory_ids=["slow.0", "slow.1"])
        client.send("ack", trajectory_ids=["quick.0"])
        eventually(lambda: untouched(thread))


def test_budgets_go_on_too() -> None:
    with pair(Named(0.01)) as (thread, client):
        budget: dict[str, Any] = {"max_total_tokens": 63, "script": [[5, 6]] * 3}
        groups = [group(client, "a", name="g"), group(client, "slow", name="h", **budget)]
        batch = client.submit(groups, groups_needed=1)
        list(batch)
        eventually(lambda: thread.service.runs.admission.kept == 1)
        (t,) = client.submit(resume=batch.kept)
        assert (t.finish_reason, len(t.token_ids)) == ("max_total_tokens", 63)
        assert t.truncation is not None
        assert (t.truncation.limit, t.truncation.value) == ("max_total_tokens", 63)


def test_time_apart_counts_in_no_deadline_and_time_before_does() -> None:
    with pair(Named(0.02)) as (thread, client):
        slow = group(client, "slow", name="h", trajectory_deadline_s=1.5)
        batch = client.submit([group(client, "a", name="g"), slow], groups_needed=1)
        list(batch)
        time.sleep(1.6)
        (t,) = client.submit(resume=batch.kept)
        assert whole(t)
        assert t.times.paused > 1.5
        slow = group(client, "slow.2", name="i", trajectory_deadline_s=0.4)
        batch = client.submit([group(client, "b", name="g"), slow], groups_needed=1, surplus="return")
        cut = next(t for t in batch if t.resumable)
        (t,) = client.submit(resume=[cut])
        assert t.finish_reason == "trajectory_deadline"
        assert t.truncation is not None
        assert (t.truncation.limit, t.truncation.value) == ("trajectory_deadline_s", 0.4)
        eventually(lambda: untouched(thread))


def test_a_kept_trajectory_that_waits_for_the_trainer_is_asked_again() -> None:
    with pair(Named(0.0)) as (thread, client):
        groups = [
            group(client, "a", name="g"),
            group(client, "r", name="h", environment="remote", on_length="continue"),
        ]
        batch = client.submit(groups, groups_needed=1)
        seen = [type(event) for event in batch.events()]
        assert Trajectory in seen
        again = client.submit(resume=batch.kept)
        for event in again.events():
            if isinstance(event, TurnDone):
                client.continue_(event, done=True, reward=2.0)
            else:
                assert (event.finish_reason, event.reward, len(event.turns)) == ("env_done", 2.0, 1)
        eventually(lambda: untouched(thread))


def test_what_is_kept_ends_with_its_session() -> None:
    with worker(Named(0.05)) as thread:
        with RolloutClient(thread.address) as client:
            list(client.submit([group(client, "a"), group(client, "slow", name="h")], groups_needed=1))
            eventually(lambda: thread.service.runs.admission.kept == 1)
            thread.service.sessions._client_timeout = 0.1
        eventually(lambda: untouched(thread))


def test_partials_beyond_their_share_of_the_memory_are_returned() -> None:
    with pair(Named(0.05), limits=Limits(result_bytes=60_000)) as (thread, client):
        names = [f"slow.{i}" for i in range(3)]
        batch = client.submit([group(client, "a"), group(client, *names, name="h")], groups_needed=1)
        returned = [t for t in batch if t.resumable]
        kept = [name for part in batch.kept for name in part.trajectory_ids]
        # A quarter of 60,000 bytes holds one partial of 10,000.
        assert (len(kept), len(returned)) == (1, 2)
        assert {*kept, *(t.trajectory_id for t in returned)} == {*names}
        assert all(whole(t) for t in client.submit(resume=[*batch.kept, *returned]))
        eventually(lambda: untouched(thread))


def test_resumed_groups_count_what_they_had() -> None:
    with pair(Named(0.05)) as (_, client):
        half = group(client, "h.0", "slow.0", "slow.1", name="h")
        batch = client.submit([half, group(client, "a", "b", name="g")], groups_needed=1, min_complete=2)
        list(batch)
        (part,) = batch.kept
        assert (part.id, part.trajectory_ids, part.sample_indices, part.counted) == (
            "h",
            ("slow.0", "slow.1"),
            (1, 2),
            1,
        )
        again = client.submit(resume=batch.kept, groups_needed=1, min_complete=2)
        # One more makes two: the other one is surplus again.
        assert sum(t.ok for t in again) >= 1
        assert client.status().trajectories_running == 0


class Closing(Environment):
    """Has its record while it closes."""

    async def step(self, turn: TurnResult) -> Step:  # noqa: ARG002
        return Step(done=True)

    async def close(self) -> None:
        await asyncio.sleep(0.02)


def test_what_ends_while_it_is_to_be_kept_is_not_lost() -> None:
    with pair(TimedEngine(), what=served(env=(f"closing={HERE}:Closing",))) as (thread, client):
        for round_ in range(5):
            names = [f"{round_}.{i}" for i in range(8)]
            several = group(client, *names, name=f"g{round_}", environment="closing", on_length="continue")
            batch = client.submit(several, min_complete=1)
            ended = [t.trajectory_id for t in batch if t.ok]
            later = [t.trajectory_id for t in client.submit(resume=batch.kept) if t.ok] if batch.kept else []
            assert sorted([*ended, *later]) == names
        eventually(lambda: untouched(thread))


def test_what_had_not_begun_takes_its_share_of_the_memory_too() -> None:
    with pair(Named(1.0), at_once=3, limits=Limits(result_bytes=8 * 2**20)) as (_, client):
        rounds = []
        for i in range(3):
            names = ["a", "b", *(f"slow{k}" for k in range(200))]
            batch = client.submit(group(client, *(f"{n}.{i}" for n in names), name=f"g{i}"), min_complete=2)
            returned = [t for t in batch if t.finish_reason == "abort_surplus"]
            rounds.append((sum(len(g.trajectory_ids) for g in batch.kept), len(returned)))
        assert all(kept + came == 200 for kept, came in rounds)
        assert rounds[0][0] == 200
        assert rounds[2][0] < 100
        wire = client.status().wire
        assert wire["kept"] == sum(kept for kept, _ in rounds)
        assert wire["kept_bytes"] <= 2 * 2**20


def test_the_time_that_the_trainer_has_stands_still_while_he_gets_no_questions() -> None:
    with pair(Named(1.0)) as (thread, client):
        ask = {"environment": "remote", "on_length": "continue", "tool_deadline_s": 0.4}
        batch = client.submit([group(client, "r", name="h", tokens=4, **ask), group(client, "a")], groups_needed=1)
        assert [type(event) for event in batch.events()].count(TurnDone) == 1
        time.sleep(0.6)
        (ended,) = (
            event
            for event in client.submit(resume=batch.kept).events()
            if not isinstance(event, TurnDone) or client.continue_(event, done=True, reward=1.0)
        )
        assert (ended.finish_reason, ended.reward) == ("env_done", 1.0)
        unanswered = list(client.submit(group(client, "q", tokens=4, **ask)).events())
        assert [getattr(event, "finish_reason", None) for event in unanswered] == [None, "tool_deadline"]
        eventually(lambda: untouched(thread))


class Crossing(Named):
    """Whatever is to be aborted has reached its end a moment before."""

    def _take(self, command: Command) -> None:
        if not isinstance(command, Abort):
            super()._take(command)
            return
        for name in command.request_ids:
            self._end(name, "length")


def test_a_turn_that_ended_its_trajectory_while_it_was_to_be_broken_off_is_in_a_record() -> None:
    with pair(Crossing(1.0)) as (thread, client):
        batch = client.submit(group(client, "a", "slow", on_length="end"), min_complete=1)
        results = batch.results(timeout=10)
        assert [(t.trajectory_id, t.finish_reason) for t in results] == [("a", "length"), ("slow", "length")]
        assert all(whole(t) for t in results)
        assert batch.kept == ()
        eventually(lambda: untouched(thread))


def test_what_was_returned_after_its_last_turn_has_no_further_one() -> None:
    with pair(Crossing(1.0)) as (thread, client):
        ask = {"script": [[5], [6]], "on_length": "end"}
        batch = client.submit(group(client, "a", "slow", **ask), min_complete=1, surplus="return")
        slow = next(t for t in batch.results(timeout=10) if t.trajectory_id == "slow")
        assert (slow.finish_reason, slow.resumable, len(slow.turns)) == ("abort_surplus", True, 1)
        (again,) = client.submit(resume=[slow]).results(timeout=10)
        assert (again.finish_reason, len(again.turns)) == ("length", 1)
        assert whole(again)
        eventually(lambda: untouched(thread))


def test_parts_of_a_group_that_were_kept_and_returned_apart_go_on_together_and_are_kept_again() -> None:
    with pair(Named(0.05)) as (thread, client):
        first = client.submit(group(client, "a", "slow0", "slow1"), min_complete=1)
        assert len(first.results(timeout=10)) == 1
        (kept,) = first.kept
        assert set(kept.trajectory_ids) == {"slow0", "slow1"}
        enough = group(client, "b", name="h")
        second = client.submit(enough, resume=first.kept, groups_needed=1, min_complete=1, surplus="return")
        returned = {t.trajectory_id: t for t in second.results(timeout=10)}
        assert returned.keys() == {"b", "slow0", "slow1"}
        parts: list[Group] = []
        for name in ("slow0", "slow1"):
            batch = client.submit(
                group(client, "c", name="i"), resume=[returned[name]], groups_needed=1, min_complete=1
            )
            assert [t.trajectory_id for t in batch.results(timeout=10)] == ["c"]
            parts += batch.kept
        assert [part.trajectory_ids for part in parts] == [("slow0",), ("slow1",)]
        third = client.submit(group(client, "d", name="j"), resume=parts, groups_needed=1, min_complete=1)
        assert [t.trajectory_id for t in third.results(timeout=10)] == ["d"]
        (kept,) = third.kept
        assert set(kept.trajectory_ids) == {"slow0", "slow1"}
        (whole_group,) = client.submit(resume=parts).groups()
        assert [t.trajectory_id for t in whole_group] == ["slow0", "slow1"]
        assert all(whole(t) for t in whole_group)
        eventually(lambda: untouched(thread))


class Slowly(Named):
    """Lets the test say when aborts take effect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.aborts: list[Command] = []

    def _take(self, command: Command) -> None:
        if isinstance(command, Abort):
            self.aborts.append(command)
        else:
            super()._take(command)

    def abort_now(self) -> None:
        for command in self.aborts:
            self._later(0.0, functools.partial(super()._take, command))
        self.send(Ping())


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_what_nobody_wants_any_more_while_it_is_to_be_kept_is_not_kept(how: str) -> None:
    engine = Slowly(1.0)
    with pair(engine, timeouts=Timeouts(client=0.1)) as (thread, client):
        batch = client.submit(group(client, "a", "slow"), min_complete=1)
        assert next(iter(batch)).trajectory_id == "a"
        eventually(lambda: bool(engine.aborts))
        if how == "cancel":
            batch.close()
            client.status()
        else:
            client.close()
            eventually(lambda: not thread.call(lambda service: len(service.sessions)))
        engine.abort_now()
        eventually(lambda: untouched(thread))
        assert not thread.call(lambda service: service.runs._kept)


# Returned, and gone on with elsewhere.


class Counting(Environment):
    """Ends after three turns, and says how many there were, to another instance as well."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.turns = 0

    async def step(self, turn: TurnResult) -> Step:  # noqa: ARG002
        self.turns += 1
        return Step(observation=[self.turns], done=self.turns == 3)

    def snapshot(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def restore(self, context: Any, state: Any) -> None:
        assert context.sample_index == 0
        self.turns = state["turns"]


class Forgetful(Environment):
    async def step(self, turn: TurnResult) -> Step:
        return Step(observation=[9], done=turn.index == 2)


PLUGINS = (f"counting={HERE}:Counting", f"forgetful={HERE}:Forgetful")


def returned(client: RolloutClient, environment: str, surplus: Literal["keep", "return"] = "return") -> Trajectory:
    slow = group(client, "slow", name="h", environment=environment, on_length="continue")
    quick = group(client, "a", name="g", environment="counting", on_length="continue")
    batch = client.submit([quick, slow], groups_needed=1, surplus=surplus)
    return next(t for t in batch if t.trajectory_id == "slow")


@pytest.mark.parametrize("surplus", ["return", "keep"])
def test_an_environment_that_says_its_state_goes_on_in_another_worker(surplus: Literal["keep", "return"]) -> None:
    """And so does what was to be kept where there is no room for it."""
    small = Limits(result_bytes=300_000)
    with pair(Named(0.01), what=served(env=PLUGINS, max_context=512), limits=small) as (_, client):
        t = returned(client, "counting", surplus)
        assert t.resumable
    with pair(TimedEngine(), what=served(env=PLUGINS)) as (thread, client):
        (done,) = client.submit(resume=[t])
        assert (done.finish_reason, [turn.length for turn in done.turns]) == ("env_done", [50, 50, 50])
        np.testing.assert_array_equal(done.token_ids[: len(t.token_ids)], t.token_ids)
        np.testing.assert_array_equal(done.logprobs[: len(t.token_ids)], t.logprobs)
        eventually(lambda: untouched(thread))


def test_one_that_does_not_is_not_resumable_and_refused_by_name() -> None:
    with pair(Named(0.01), what=served(env=PLUGINS)) as (_, client):
        t = returned(client, "forgetful")
        assert not t.resumable
        with pytest.raises(BadRequest, match="cannot go on") as caught:
            client.submit(resume=[t])
        assert caught.value.field == "resume[0]"
        assert t.group is not None
        forged = t.record.model_copy(update={"partial": returned(client, "counting").record.partial})
        with pytest.raises(BadRequest) as refused:
            client.submit(resume=[Trajectory(forged, lambda _: None, t.group)])
        assert refused.value.field == "partials[0].partial.snapshot"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sample_index": 5}, "sample_index"),
        ({"group_id": "other"}, "group_id"),
        ({"trajectory_id": "other"}, "trajectory_id"),
        ({"partial": None}, "partial"),
    ],
)
def test_a_record_that_is_not_of_its_trajectory_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pair(Named(0.01), what=served(env=PLUGINS)) as (_, client), RawClient(client._core.address) as raw:
        t = returned(client, "counting")
        assert t.group is not None
        home = t.group.model_copy(update={"sampling": t.sampling})
        raw.hello()
        record = t.record.model_copy(update=changes)
        message = SubmitBatch(id="x", batch_id="raw", groups=(home,), partials=(record,))
        raw.socket.send_multipart(encode(message))
        error = raw.reply("x")["error"]
        assert (error["code"], error["field"]) == ("bad_request", f"partials[0].{field}")


def test_a_turn_goes_on_only_where_it_has_tokens_left() -> None:
    with pair(Named(0.01)) as (_, client), RawClient(client._core.address) as raw:
        groups = [group(client, "slow1", name="g", tokens=20), group(client, "slow2", name="h")]
        batch = client.submit(groups, groups_needed=1, surplus="return")
        t = next(t for t in batch if t.trajectory_id == "slow2")
        assert t.group is not None
        assert 0 < t.turns[-1].length < 50
        raw.hello()
        record = t.record.model_copy(update={"partial": Partial(answered=False, max_tokens=t.turns[-1].length)})
        home = t.group.model_copy(update={"sampling": t.sampling})
        raw.socket.send_multipart(encode(SubmitBatch(id="x", batch_id="raw", groups=(home,), partials=(record,))))
        error = raw.reply("x")["error"]
        assert (error["code"], error["field"]) == ("bad_request", "partials[0].partial.max_tokens")


@pytest.mark.parametrize("asked", [0, 2])
@pytest.mark.parametrize("there", [0, 2, 3])
def test_alternatives_go_on_as_many_as_they_were(asked: int, there: int) -> None:
    with pair(Named(0.01)) as (_, client), RawClient(client._core.address) as raw:
        groups = [group(client, "slow1", name="g", tokens=20), group(client, "slow2", name="h")]
        law = groups[1].sampling.model_copy(update={"top_logprobs": asked})
        groups[1] = groups[1].model_copy(update={"sampling": law})
        batch = client.submit(groups, groups_needed=1, surplus="return")
        t = next(t for t in batch if t.trajectory_id == "slow2")
        assert t.group is not None
        (segment,) = t.record.segments
        rows = int((segment.source == SOURCE_SAMPLED).sum())
        top = {"top_ids": np.zeros((rows, there), np.int32), "top_logprobs": np.zeros((rows, there), np.float32)}
        changed = segment.model_copy(update=top if there else dict.fromkeys(top))
        record = t.record.model_copy(update={"segments": (changed,)})
        home = t.group.model_copy(update={"sampling": t.sampling})
        raw.hello()
        raw.socket.send_multipart(encode(SubmitBatch(id="x", batch_id="raw", groups=(home,), partials=(record,))))
        if there == asked:
            assert raw.reply("x")["trajectories"] == 1
            assert raw.record()["finish_reason"] == "length"
        else:
            assert raw.reply("x")["error"]["field"] == "partials[0].segments[0].top_ids"


# Tried again.


class Flaky(Environment):
    """Fails for sample indices below 3."""

    async def reset(self, context: Any) -> None:
        self.index, self.least = context.sample_index, context.config.get("least", 3)

    async def step(self, turn: TurnResult) -> Step:  # noqa: ARG002
        if self.index < self.least:
            raise RuntimeError(f"no luck with {self.index}")
        return Step(done=True)


def test_a_failed_sample_starts_again_with_a_new_index_and_has_one_record() -> None:
    with pair(TimedEngine(), what=served(env=(f"flaky={HERE}:Flaky",))) as (thread, client):
        ask = {"environment": "flaky", "on_length": "continue"}
        results = client.submit(group(client, "a", "b", "c", **ask), max_retries=2).results()
        assert [t.trajectory_id for t in results] == ["a", "b", "c"]
        assert all(t.ok and t.record.retries == 1 for t in results)
        assert [t.sample_index for t in results] == [INDEX_STRIDE, INDEX_STRIDE + 1, INDEX_STRIDE + 2]
        assert all(len(t.turns) == 1 and whole(t) for t in results)
        never = ask | {"config": {"least": 2**40}}
        (failed,) = client.submit(group(client, "d", **never), max_retries=1).results()
        assert (failed.status, failed.record.retries, failed.sample_index) == ("failed", 1, INDEX_STRIDE)
        (failed,) = client.submit(group(client, "e", **ask)).results()
        assert (failed.status, failed.record.retries, failed.sample_index) == ("failed", 0, 0)
        eventually(lambda: untouched(thread))


def test_a_further_attempt_is_no_copy_of_a_sample_that_came_in_another_batch() -> None:
    with pair(TimedEngine(), what=served(env=(f"flaky={HERE}:Flaky",))) as (_, client):
        ask: Any = {"environment": "flaky", "on_length": "continue", "config": {"least": 0}}
        first = client.submit(group(client, "a", "b", "c", "d", **ask)).results()
        again = group(client, "e", **ask | {"config": {"least": 4}})
        (t,) = client.submit(again.model_copy(update={"sample_indices": (3,)}), max_retries=1).results()
        assert (t.ok, t.record.retries) == (True, 1)
        assert t.sample_index not in {sample.sample_index for sample in first}


def test_an_id_is_taken_while_it_is_tried_again_and_a_repeat_is_known() -> None:
    with pair(TimedEngine(0.01), what=served(env=(f"flaky={HERE}:Flaky",))) as (_, client):
        ask: Any = {"environment": "flaky", "on_length": "continue", "config": {"least": 3 * INDEX_STRIDE}}
        batch = client.submit(group(client, "a", **ask), max_retries=5)
        with pytest.raises(Duplicate):
            client.submit(group(client, "a"))
        (t,) = batch
        assert (t.ok, t.record.retries) == (True, 3)
