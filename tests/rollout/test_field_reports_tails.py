"""Field reports 64 and 65: groups short of members, and lengths over cuts, retries and clips."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.request import Completion, Request
from rollout.client import RolloutClient, Trajectory
from rollout.environments.base import Context, Environment, Step, TurnResult
from tests.rollout.batches.test_batches import untouched
from tests.rollout.raw_client import RawClient
from tests.rollout.raw_client import group as raw_group
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.workers import eventually, served, worker

HERE = "tests.rollout.test_field_reports_tails"
PLUGINS = tuple(f"{name.lower()}={HERE}:{name}" for name in ("Moody", "Talker", "Lucky"))
CONTEXT = 64


class Moody(Environment):
    """Samples named in the config return nothing, hang, or wait to be cancelled; others are worth their index."""

    on_length = "continue"

    async def reset(self, context: Context) -> None:
        self.index = context.sample_index
        self.mood = {index: mood for mood, indices in context.config.items() for index in indices}.get(self.index)

    async def step(self, turn: TurnResult) -> Step:
        if self.mood == "nothing":
            return None  # type: ignore[return-value]
        if self.mood in ("hang", "wait"):
            await asyncio.get_running_loop().create_future()
        return Step(done=turn.index == 1)

    async def finish(self, record: Any) -> float:  # noqa: ARG002
        return float(self.index)


def consistent(t: Trajectory) -> None:
    """What holds of every record, however it came about."""
    assert len(t.token_ids) == len(t.logprobs) == len(t.loss_mask) == len(t.source) <= CONTEXT
    assert len(t.response_ids) == len(t.response_logprobs) == len(t.response_mask)
    assert not t.logprobs[t.source != 1].any()
    assert not t.loss_mask[t.source != 1].any()
    assert (t.logprobs[t.source == 1] < 0).all()
    assert t.loss_mask[t.source == 1].all() == (t.status != "failed") or not (t.source == 1).any()
    spans = [(turn.start, turn.start + turn.length) for turn in t.turns]
    assert sum(end - start for start, end in spans) == (t.source == 1).sum()
    assert all(t.source[start:end].all() for start, end in spans)
    assert t.weight_versions[:, 1].sum() == (t.source == 1).sum()


# 64: every member is there, and says what it is.


@pytest.mark.parametrize("wanted", [{}, {"min_complete": 4}, {"min_complete": 5, "groups_needed": 1}])
def test_a_group_of_eight_of_which_four_fail_comes_whole_in_order_and_marked(wanted: dict[str, Any]) -> None:
    moods = {"nothing": [1, 5], "hang": [2], "wait": [6]}
    with (
        worker(what=served(max_context=CONTEXT, env=PLUGINS)) as thread,
        RolloutClient(thread.address) as client,
    ):
        group = client.group([1, 2, 3], 8, id="g", max_tokens=4, environment="moody", config=moods, tool_deadline_s=1.0)
        batch = client.submit(group, surplus="return", **wanted)
        eventually(lambda: batch.ended >= 4 or bool(wanted))
        client.cancel(trajectory_ids=["g.6"])
        results = batch.results(timeout=20)
        assert [t.trajectory_id for t in results] == [f"g.{i}" for i in range(8)]
        assert [t.sample_index for t in results] == list(range(8))
        usable = [t for t in results if t.status == "completed"]
        assert {t.sample_index: t.reward for t in usable} == {0: 0.0, 3: 3.0, 4: 4.0, 7: 7.0}
        marked = {t.sample_index: (t.status, t.finish_reason, t.reward) for t in results if t.status != "completed"}
        assert marked[1] == marked[5] == ("failed", "env_error", None)
        assert marked[6][0] == "aborted"
        # A call that hangs is cut by its deadline, or as surplus where four were enough.
        assert marked[2] in (("truncated", "tool_deadline", 2.0), ("aborted", "abort_surplus", None))
        for t in results:
            consistent(t)
        eventually(lambda: untouched(thread))


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("wanted", [{}, {"min_complete": 1}, {"groups_needed": 1}])
def test_a_group_of_which_all_fail_ends_and_says_so(n: int, wanted: dict[str, Any]) -> None:
    with worker(what=served(env=PLUGINS)) as thread, RawClient(thread.address) as client:
        client.hello()
        config = {"nothing": list(range(n))}
        bad = raw_group("g", n=n, environment={"name": "moody", "config": config})
        assert client.call("submit", batch_id="b", groups=[bad], **wanted)["type"] == "accepted"
        records = [client.record() for _ in range(n)]
        assert {record["trajectory_id"] for record in records} == {f"g.{i}" for i in range(n)}
        assert all(record["status"] == "failed" and record["reward"] is None for record in records)
        done = client.event("group_done")
        assert (done["counts"], done["complete"], done["short"]) == ({"failed": n}, False, True)
        assert client.event("batch_done")["counts"] == {"failed": n}
        eventually(lambda: untouched(thread))


def test_a_neighbour_of_a_short_group_does_not_wait_for_it() -> None:
    with worker(what=served(env=PLUGINS)) as thread, RolloutClient(thread.address) as client:
        waits = client.group([1], 2, id="waits", max_tokens=2, environment="moody", config={"wait": [0, 1]})
        good = client.group([1], 2, id="good", max_tokens=2, environment="moody")
        batch = client.submit([waits, good], groups_needed=1, surplus="return")
        ended = {group[0].group_id: group for group in batch.groups()}
        assert all(t.ok for t in ended["good"])
        assert {t.finish_reason for t in ended["waits"]} == {"abort_surplus"}


# 65: lengths agree, however the record came about.


class Talker(Environment):
    """Says ten tokens after each turn; after the second one more than the context holds, where it is told to."""

    on_length = "continue"

    async def reset(self, context: Context) -> None:
        self.flood = bool(context.config.get("flood"))

    async def step(self, turn: TurnResult) -> Step:
        return Step(observation=[9] * (CONTEXT if self.flood and turn.index == 1 else 10), done=turn.index == 2)

    def snapshot(self) -> dict[str, Any]:
        return {"flood": self.flood}

    def restore(self, context: Context, state: Any) -> None:
        assert context.max_context == CONTEXT
        self.flood = state["flood"]


class Lucky(Talker):
    """Raises in the second turn of the first attempt."""

    async def reset(self, context: Context) -> None:
        await super().reset(context)
        self.index = context.sample_index

    async def step(self, turn: TurnResult) -> Step:
        if self.index == 0 and turn.index == 1:
            raise RuntimeError("no luck")
        return await super().step(turn)


class Slow(TimedEngine):
    """The second turn of trajectories that are called so takes a while, until it was broken off once."""

    def _seconds(self, request: Request) -> float:
        waits = "slow" in request.id and request.id.endswith("/1") and request.id not in self.aborted
        return request.max_tokens * 0.2 if waits else 0.0


class Odd(TimedEngine):
    """Changes the reply to every second turn."""

    def __init__(self, change: Callable[[Completion], Completion]) -> None:
        super().__init__()
        self.change = change

    def _completion(self, request: Request, *rest: Any) -> Completion:
        completion = super()._completion(request, *rest)
        return self.change(completion) if request.id.endswith("/1") else completion


def run(client: RolloutClient, environment: str = "talker", name: str = "t", **fields: Any) -> Any:
    return client.group([1, 2, 3], id=name, trajectory_ids=[name], max_tokens=5, environment=environment, **fields)


@pytest.mark.parametrize("surplus", ["keep", "return"])
def test_what_was_cut_in_its_second_turn_and_went_on(surplus: str) -> None:
    with (
        worker(Slow(), what=served(max_context=CONTEXT, env=PLUGINS)) as thread,
        RolloutClient(thread.address) as client,
    ):
        batch = client.submit(
            [run(client, name="slow"), run(client, name="quick")],
            groups_needed=1,
            surplus=surplus,  # type: ignore[arg-type]
        )
        first = batch.results(timeout=20)
        for t in first:
            consistent(t)
        (t,) = client.submit(resume=[*batch.kept, *(t for t in first if t.resumable)]).results(timeout=20)
        consistent(t)
        assert [(turn.start, turn.length) for turn in t.turns] == [(3, 5), (18, 5), (33, 5)]
        (whole,) = client.submit(run(client, name="other")).results(timeout=20)
        np.testing.assert_array_equal(t.source, whole.source)
        eventually(lambda: untouched(thread))


def test_what_was_tried_again_starts_empty() -> None:
    with (
        worker(what=served(max_context=CONTEXT, env=PLUGINS)) as thread,
        RolloutClient(thread.address) as client,
    ):
        (t,) = client.submit(run(client, "lucky"), max_retries=1).results(timeout=20)
        consistent(t)
        assert (t.status, t.record.retries, len(t.turns)) == ("completed", 1, 3)
        assert [turn.start for turn in t.turns] == [3, 18, 33]


def test_an_observation_that_does_not_fit_is_not_appended_in_part() -> None:
    with (
        worker(what=served(max_context=CONTEXT, env=PLUGINS)) as thread,
        RolloutClient(thread.address) as client,
    ):
        (t,) = client.submit(run(client, config={"flood": True})).results(timeout=20)
        consistent(t)
        assert (t.status, t.finish_reason, len(t.token_ids)) == ("truncated", "context_overflow", 23)
        assert t.truncation is not None
        assert (t.truncation.limit, t.truncation.value) == ("max_context", CONTEXT)


def _empty(completion: Completion) -> Completion:
    none = {mode: array[:0] for mode, array in completion.logprobs.items()}
    return replace(completion, token_ids=completion.token_ids[:0], logprobs=none, weight_versions=())


def test_a_turn_without_tokens_is_a_turn_of_length_zero() -> None:
    with (
        worker(Odd(_empty), what=served(max_context=CONTEXT, env=PLUGINS)) as thread,
        RolloutClient(thread.address) as client,
    ):
        (t,) = client.submit(run(client)).results(timeout=20)
        consistent(t)
        assert [turn.length for turn in t.turns][:2] == [5, 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda completion: replace(completion, logprobs={}),
        lambda completion: replace(completion, logprobs={"processed": completion.logprobs["processed"][:-1]}),
        lambda completion: replace(completion, logprobs={"processed": completion.logprobs["processed"] * np.nan}),
    ],
)
def test_logprobs_that_are_missing_are_never_made_up(change: Callable[[Completion], Completion]) -> None:
    with (
        worker(Odd(change), what=served(max_context=CONTEXT, env=PLUGINS)) as thread,
        RolloutClient(thread.address) as client,
    ):
        (t,) = client.submit(run(client)).results(timeout=20)
        consistent(t)
        assert (t.status, t.finish_reason) == ("failed", "error")
        assert t.error is not None
        assert "logprobs" in t.error.message
        # The first turn is whole, and nothing of the second one is there.
        assert len(t.turns) == 1
