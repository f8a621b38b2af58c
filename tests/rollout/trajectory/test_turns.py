"""What a record says of a turn: of one that ran through, and of one that was broken off and gone on with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.request import Completion
from protocols.fields import Times, Turn
from rollout.trajectory.turns import ABORTED, add_times, gone_on, turn_of
from tests.rollout.build import ids


def completion(count: int, reason: Any = "stop", **fields: Any) -> Completion:
    logprobs: dict[Any, Any] = {"processed": np.zeros(count, np.float32)}
    made = Completion("r", reason, ids(*range(20, 20 + count)), logprobs, weight_versions=((0, count),), kv_version=0)
    return replace(made, **fields)


def made(count: int, reason: Any = "stop", limit: int | None = 8, **fields: Any) -> Turn:
    return turn_of(completion(count, reason, **fields), Times(decode=1.0), index=2, start=7, limit=limit)


def test_a_turn_is_where_it_is_and_what_the_engine_says_of_it() -> None:
    turn = made(3, stop=22, cached_tokens=4, computed_tokens=3, preemptions=1)
    assert (turn.index, turn.start, turn.length, turn.prompt_len) == (2, 7, 3, 7)
    assert (turn.finish_reason, turn.stop) == ("stop", "22")
    assert (turn.cached_tokens, turn.computed_tokens, turn.preemptions) == (4, 3, 1)
    assert (turn.times, turn.reward) == (Times(decode=1.0), None)


@pytest.mark.parametrize(
    ("stop", "said"),
    [(None, None), (0, "0"), (151645, "151645"), (b"STOP", "STOP"), (b"", ""), ("ä".encode()[:1], "�")],
)
def test_what_stopped_it_is_a_text(stop: Any, said: str | None) -> None:
    assert made(1, stop=stop).stop == said


@pytest.mark.parametrize("reason", ABORTED)
@pytest.mark.parametrize(("count", "limit", "goes_on"), [(0, 1, True), (7, 8, True), (8, 8, False), (8, None, True)])
def test_a_turn_that_has_all_its_tokens_cannot_go_on(reason: str, count: int, limit: int | None, goes_on: bool) -> None:
    assert made(count, reason, limit).finish_reason == (reason if goes_on else "length")


@pytest.mark.parametrize("reason", ["stop", "length", "turn_deadline", "context_overflow", "error"])
def test_other_reasons_stay_as_they_are_at_the_limit_too(reason: str) -> None:
    assert made(8, reason, 8).finish_reason == reason


def test_a_turn_that_goes_on_is_one_turn() -> None:
    before = made(3, "abort_client", cached_tokens=4, computed_tokens=3, preemptions=1)
    rest = completion(2, "stop", stop=21, cached_tokens=9, computed_tokens=1, preemptions=2)
    turn = gone_on(before, rest, Times(queue=0.5, decode=0.25), limit=8)
    assert (turn.index, turn.start, turn.length, turn.prompt_len) == (2, 7, 5, 7)
    assert (turn.finish_reason, turn.stop) == ("stop", "21")
    assert turn.preemptions == 1 + 2 + 1, "being broken off is one of them"
    assert turn.cached_tokens == 4, "of its start"
    assert turn.computed_tokens == 3 + 1, "what is computed again counts again"
    assert turn.times == Times(queue=0.5, decode=1.25)


@pytest.mark.parametrize(("count", "reason"), [(4, "abort_client"), (5, "length")])
def test_its_limit_counts_what_it_had(count: int, reason: str) -> None:
    turn = gone_on(made(3, "abort_client"), completion(count, "abort_client"), Times(), limit=8)
    assert (turn.length, turn.finish_reason) == (3 + count, reason)


def test_it_may_be_broken_off_again_and_end_with_nothing_more() -> None:
    turn = made(3, "abort_client")
    for reason in ("abort_weight_update", "turn_deadline"):
        turn = gone_on(turn, completion(0, reason), Times(queue=1.0), limit=8)
        assert (turn.length, turn.finish_reason, turn.stop) == (3, reason, None)
    assert (turn.preemptions, turn.times.queue) == (2, 2.0)


def test_all_times_are_added() -> None:
    names = list(Times.model_fields)
    one, other = (Times(**{name: float(n * k) for n, name in enumerate(names)}) for k in (1, 10))
    assert add_times(one, other).model_dump() == {name: 11.0 * n for n, name in enumerate(names)}
