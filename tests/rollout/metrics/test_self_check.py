from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from protocols.errors import EngineDead
from protocols.fields import Record
from protocols.replies import Scored
from protocols.requests import Score
from rollout.client import RolloutClient
from rollout.command.cli import parse
from rollout.command.load import load
from rollout.metrics.observer import Round
from rollout.metrics.row import ROUND_AXIS, Row
from rollout.metrics.self_check import NAME, WAITING, SelfCheck, question
from tests import rigs
from tests.rollout.metrics.records import ROUND, record
from tests.rollout.metrics.test_watch import Watched
from tests.rollout.workers import WorkerThread, eventually, on_loop, soon


def answer(one: Record, off: float, version: int = 0) -> Scored:
    """A score of it whose logprobs are off by so much."""
    again = one.segments[0].logprobs + np.float32(off)
    again[0] = np.nan
    return Scored(id="", weight_version=version, logprobs={"processed": (again,)})


async def rows(check: SelfCheck, put: list[Row], score: Callable[[Score], Scored], count: int) -> None:
    async def ask(message: Score) -> Scored:
        return score(message)

    task = asyncio.create_task(check.run(ask))
    await soon(lambda: len(put) == count)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@on_loop
async def test_the_first_trajectory_of_each_round_is_scored_again_under_its_law() -> None:
    put: list[Row] = []
    asked: list[Score] = []
    check = SelfCheck(put.append)
    first, second = record(lengths=(4, 3)), record(lengths=(9,))
    other = Round("session", "other", 8, 0.0)
    check.offer(ROUND, first, 0)
    check.offer(ROUND, second, 0)
    check.offer(other, second, 0)

    def score(message: Score) -> Scored:
        asked.append(message)
        return answer(first if len(asked) == 1 else second, 0.25)

    await rows(check, put, score, 2)
    assert [(row.values[ROUND_AXIS], row.values[NAME]) for row in put] == [(7, 0.25), (8, 0.25)]
    assert asked[0].sequences[0].tolist() == first.segments[0].token_ids.tolist()
    assert asked[0].sampled is not None
    assert asked[0].sampled[0].tolist() == [0, 0] + [1] * 7
    assert asked[0].sampling.logprobs == ("processed",)


@on_loop
async def test_what_cannot_be_compared_is_not_taken() -> None:
    put: list[Row] = []
    check = SelfCheck(put.append)
    check.offer(ROUND, record("abort_client"), 0)
    check.offer(ROUND, record("env_error"), 0)
    check.offer(ROUND, record(purpose="eval"), 0)
    check.offer(ROUND, record(lengths=(4,), versions=[(0, 2), (1, 2)]), 1)
    check.offer(ROUND, record(lengths=(4,), versions=[(0, 4)]), 1)
    good = record(lengths=(4,), versions=[(1, 4)])
    check.offer(ROUND, good, 1)
    await rows(check, put, lambda _: answer(good, 0.5, version=1), 1)
    assert put[0].values[NAME] == 0.5


@on_loop
async def test_a_score_that_fails_or_is_of_other_weights_gives_no_row_and_the_next_one_does() -> None:
    put: list[Row] = []
    check = SelfCheck(put.append)
    one = record()
    for step in range(3):
        check.offer(Round("session", f"b{step}", step, 0.0), one, 0)
    answers = iter((EngineDead("gone"), answer(one, 0.1, version=5), answer(one, 0.125)))

    def score(_: Score) -> Scored:
        found = next(answers)
        if isinstance(found, EngineDead):
            raise found
        return found

    await rows(check, put, score, 1)
    assert (put[0].values[ROUND_AXIS], put[0].values[NAME]) == (2, 0.125)


@on_loop
async def test_rounds_that_come_faster_than_scores_go_without() -> None:
    put: list[Row] = []
    check = SelfCheck(put.append)
    one = record()
    for step in range(20):
        batch = Round("session", f"b{step}", step, 0.0)
        check.offer(batch, one, 0)
        check.close(batch)
    await rows(check, put, lambda _: answer(one, 0.0), WAITING)
    assert [row.values[ROUND_AXIS] for row in put] == list(range(20 - WAITING, 20))


def test_the_question_asks_for_one_mode_and_nothing_else() -> None:
    one = record()
    law = one.sampling.model_copy(update={"logprobs": ("raw", "processed"), "top_logprobs": 3, "prompt_logprobs": True})
    asked = question(one.model_copy(update={"sampling": law})).sampling
    assert (asked.logprobs, asked.top_logprobs, asked.prompt_logprobs) == (("raw",), 0, False)


@pytest.mark.parametrize("off", [0.0, 0.5], ids=["as returned", "doctored"])
def test_a_real_worker_agrees_with_itself_and_notices_where_it_does_not(
    tmp_path: Path, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns, a prefix hit in the second, penalties and a temperature: all that the law can be."""
    checkpoint = rigs.write_rand(tmp_path / "rand")
    options = ["--device", "cpu", "--kv-tokens", "4096", "--max-running", "8", "--max-step-tokens", "64"]
    loaded = load(parse(["--weights", str(checkpoint), *options]))
    watch = Watched(1.0, 30.0, self_check=True)
    if off:
        offered = SelfCheck.offer

        def doctored(check: SelfCheck, batch: Round, one: Record, version: int) -> None:
            segment = one.segments[0]
            changed = segment.model_copy(update={"logprobs": segment.logprobs - np.float32(off)})
            offered(check, batch, one.model_copy(update={"segments": (changed,)}), version)

        monkeypatch.setattr(SelfCheck, "offer", doctored)
    thread = WorkerThread(loaded.handle, what=loaded.served, observer=watch.metrics).start()  # type: ignore[arg-type]
    try:
        watch.watch(thread)
        with RolloutClient(thread.address) as client:
            law = {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 3}
            group = client.group(
                [5] * 20, 2, max_tokens=12, script=[[7] * 9], ignore_eos=True, on_length="continue", **law
            )
            client.submit(group, step=6).results(timeout=60)
            eventually(lambda: any(NAME in row.values for row in watch.place.rows("round")))
    finally:
        thread.stop()
        watch.places.close(20)
    (row,) = (row for row in watch.place.rows("round") if NAME in row.values)
    assert row.values[ROUND_AXIS] == 6
    assert row.values[NAME] == pytest.approx(off, abs=1e-4)
