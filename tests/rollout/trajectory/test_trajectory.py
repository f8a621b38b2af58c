"""The trajectory as a state machine: what is appended, what it asks the engine, where it ends, what it becomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Completion, Failure, Request, SamplingParams
from engine.request import Times as EngineTimes
from protocols.codec import decode_reply, encode
from protocols.errors import Internal
from protocols.fields import (
    SOURCE_GLUE,
    SOURCE_OBSERVATION,
    SOURCE_PREFIX,
    SOURCE_PROMPT,
    SOURCE_SAMPLED,
    STATUS_OF,
    Limits,
    Record,
    Times,
    Truncation,
    Turn,
)
from protocols.replies import TrajectoryDone
from rollout.environments.answer import Answer, End
from rollout.environments.base import Rewards
from rollout.trajectory.segments import MAX_SEGMENTS
from rollout.trajectory.trajectory import Trajectory
from rollout.trajectory.turns import MAX_TURNS
from tests.rollout.build import EOS, MODEL, group, ids, spec
from tests.rollout.stub_engine import completed, refused


def trajectory(**changes: Any) -> Trajectory:
    return Trajectory(spec(group(**changes)), MODEL)


def turn(
    trajectory: Trajectory, sampled: tuple[int, ...], reason: Any = "stop", *, cut_ends: bool = True, **changes: Any
) -> End | None:
    assert trajectory.before_turn(0) is None
    request = trajectory.request()
    return trajectory.take(request, completed(request, sampled, reason, **changes), Times(), ends_when_cut=cut_ends)


def record(trajectory: Trajectory, end: End) -> Record:
    return trajectory.to_record(end, Times(), 0.0, Rewards())


def turns(t: Trajectory) -> tuple[Turn, ...]:
    (segment,) = record(t, End("abort_client")).segments
    return segment.turns


def test_the_record_is_the_running_sequence_and_nothing_else() -> None:
    t = trajectory()
    assert t.append(Answer(glue=ids(80), observation=ids(81, 82))) is None
    assert turn(t, (20, 21, EOS), version=3) is None
    assert t.answer(Answer(glue=ids(90, 91), observation=ids(30), reward=0.5), fixed_turns=False) is None
    assert turn(t, (22, EOS), version=4) is None
    end = t.answer(Answer(done=True), fixed_turns=False)
    assert end == End("env_done")
    (segment,) = record(t, end).segments
    assert segment.token_ids.tolist() == [10, 11, 12, 80, 81, 82, 20, 21, EOS, 90, 91, 30, 22, EOS]
    p, s, g, o = SOURCE_PROMPT, SOURCE_SAMPLED, SOURCE_GLUE, SOURCE_OBSERVATION
    assert segment.source.tolist() == [p, p, p, g, o, o, s, s, s, g, g, o, s, s]
    assert segment.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert segment.logprobs.tolist() == [0, 0, 0, 0, 0, 0, -0.125, -0.25, -0.375, 0, 0, 0, -0.125, -0.25]
    assert segment.weight_versions.tolist() == [[3, 3], [4, 2]]
    assert segment.kv_versions.tolist() == [[3, 3], [4, 2]]
    first, second = segment.turns
    assert (first.start, first.length, first.prompt_len, first.reward, first.stop) == (6, 3, 6, 0.5, str(EOS))
    assert (second.start, second.length, second.index, second.reward) == (12, 2, 1, None)


def test_a_turn_asks_the_engine_for_the_whole_sequence() -> None:
    sampling = {
        "temperature": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "bias_ids": ids(4, 5),
        "bias_values": np.array([1.0, -2.0], np.float32),
        "allowed_ids": ids(1, 2),
        "stop_ids": (13,),
        "stop": ("Ende ä",),
        "logprobs": ("raw", "processed"),
        "top_logprobs": 2,
        "prompt_logprobs": True,
        "frequency_penalty": 0.25,
    }
    t = trajectory(sampling=sampling)
    first = t.request()
    assert first.id == "s/t/0"
    assert first.group == "s/b/g"
    assert first.order == 5
    assert first.stop.ids == {EOS, 13}
    assert first.stop.strings == ("Ende ä".encode(),)
    assert first.logprob_modes == ("raw", "processed")
    assert (first.top_logprobs, first.prompt_logprobs, first.max_tokens) == (2, True, 8)
    assert first.sampled is None
    expected = SamplingParams(
        temperature=0.5,
        top_k=3,
        min_p=np.float64(0.1),
        frequency_penalty=0.25,
        allowed_ids=(1, 2),
        logit_bias={4: 1.0, 5: -2.0},
        seed=7,
        sample_index=1,
    )
    assert first.params == expected
    turn(t, (20, 13))
    t.answer(Answer(observation=ids(30)), fixed_turns=False)
    second = t.request()
    assert second.id == "s/t/1"
    assert second.token_ids.tolist() == [10, 11, 12, 20, 13, 30]
    assert second.sampled is not None
    assert second.sampled.tolist() == [False] * 3 + [True] * 2 + [False]
    assert (second.group, second.prompt_logprobs, second.params) == ("", False, expected)
    assert first.token_ids.tolist() == [10, 11, 12], "a request in flight was changed"


def test_ignore_eos_leaves_only_the_requests_own_stop_ids() -> None:
    assert trajectory(sampling={"ignore_eos": True, "stop_ids": (13,)}).request().stop.ids == {13}


def test_all_that_was_asked_for_comes_back() -> None:
    sampling = {"logprobs": ("temperature", "raw"), "top_logprobs": 2, "prompt_logprobs": True, "seed": 3}
    t = trajectory(sampling=sampling, metadata={"task": "x"}, purpose="eval")
    turn(t, (20, EOS))
    t.answer(Answer(observation=ids(30)), fixed_turns=False)
    turn(t, (EOS,))
    result = t.to_record(End("env_done"), Times(queue=1.0), 2.0, Rewards(0.5, {"a": 0.5}))
    (segment,) = result.segments
    assert segment.more_logprobs.keys() == {"raw"}
    assert segment.more_logprobs["raw"].tolist() == [0, 0, 0, -1.125, -1.25, 0, -1.125]
    assert segment.top_ids is not None
    assert segment.top_ids.shape == (3, 2)
    assert segment.prompt_logprobs is not None
    assert segment.prompt_logprobs.tolist() == [-2.0] * 3
    assert (result.reward, result.rewards, result.wall_s, result.times.queue) == (0.5, {"a": 0.5}, 2.0, 1.0)
    assert (result.metadata, result.purpose, result.sample_index, result.batch_id) == ({"task": "x"}, "eval", 1, "b")
    assert result.sampling.seed == 7, "the seed echoed is not the one that was used"


@pytest.mark.parametrize("reason", STATUS_OF)
def test_only_a_failed_record_is_not_trained_on(reason: Any) -> None:
    t = trajectory()
    turn(t, (20, EOS))
    failure = Internal("x").failure("step") if STATUS_OF[reason] == "failed" else None
    result = record(t, End(reason, failure=failure))
    assert result.status == STATUS_OF[reason]
    expected = [0] * 5 if result.status == "failed" else [0, 0, 0, 1, 1]
    assert result.segments[0].loss_mask.tolist() == expected
    assert result.segments[0].logprobs.tolist() == [0, 0, 0, -0.125, -0.25]


def test_each_reason_has_the_status_that_the_docs_say() -> None:
    by_status: dict[str, set[str]] = {}
    for reason, status in STATUS_OF.items():
        by_status.setdefault(status, set()).add(reason)
    assert by_status == {
        "completed": {"env_done", "max_turns", "stop"},
        "truncated": {
            "length", "max_total_tokens", "context_overflow", "tool_deadline", "trajectory_deadline",
        },
        "aborted": {"abort_client", "abort_surplus", "abort_stale", "abort_shutdown", "abort_weight_update"},
        "failed": {"env_error", "numerical_error", "error"},
    }  # fmt: skip


# Budgets.


@pytest.mark.parametrize(
    ("max_tokens", "budget", "granted", "reason", "limit"),
    [
        (8, {}, 8, "length", ("max_tokens", 8)),
        (None, {}, 61, "context_overflow", ("max_context", 64)),
        (200, {}, 61, "context_overflow", ("max_context", 64)),
        (61, {}, 61, "length", ("max_tokens", 61)),
        (8, {"max_total_tokens": 5}, 2, "max_total_tokens", ("max_total_tokens", 5)),
        (None, {"max_total_tokens": 5}, 2, "max_total_tokens", ("max_total_tokens", 5)),
        (None, {"max_total_tokens": 64}, 61, "context_overflow", ("max_context", 64)),
        (None, {"max_total_tokens": 99}, 61, "context_overflow", ("max_context", 64)),
    ],
)
def test_a_turn_gets_what_is_left_and_the_end_names_the_limit(
    max_tokens: int | None, budget: dict[str, Any], granted: int, reason: str, limit: tuple[str, float]
) -> None:
    t = trajectory(sampling={"max_tokens": max_tokens}, budget=budget)
    assert t.request().max_tokens == granted
    end = turn(t, (20,) * granted, "length")
    assert end is not None
    assert end.truncation is not None
    assert (end.reason, end.truncation.limit, end.truncation.value) == (reason, *limit)
    assert turns(t)[0].finish_reason == "length"


def test_a_cut_turn_may_go_on() -> None:
    t = trajectory(sampling={"max_tokens": 2})
    assert turn(t, (20, 21), "length", cut_ends=False) is None
    assert t.answer(Answer(observation=ids(30), max_tokens=5), fixed_turns=False) is None
    assert t.request().max_tokens == 5
    turn(t, (22, EOS))
    t.answer(Answer(observation=ids(31)), fixed_turns=False)
    assert t.request().max_tokens == 2, "the budget of one turn stayed for the next"


def test_a_turn_cut_at_the_context_limit_ends_whatever_on_length_says() -> None:
    t = trajectory(sampling={"max_tokens": None})
    end = turn(t, (20,) * 61, "length", cut_ends=False)
    assert end is not None
    assert end.reason == "context_overflow"


def test_a_turn_deadline_ends_a_turn_like_length() -> None:
    t = trajectory(budget={"turn_deadline_s": 1.5})
    assert turn(t, (20,), "turn_deadline", cut_ends=False) is None
    t.answer(Answer(), fixed_turns=False)
    end = turn(t, (), "turn_deadline")
    assert end is not None
    assert end.truncation is not None
    assert (end.reason, end.truncation.limit, end.truncation.value) == ("length", "turn_deadline_s", 1.5)
    assert [(x.length, x.finish_reason) for x in turns(t)] == [(1, "turn_deadline"), (0, "turn_deadline")]
    assert record(t, end).segments[0].token_ids.tolist() == [10, 11, 12, 20]


def test_turns_in_which_nothing_is_sampled_do_not_follow_each_other_for_ever() -> None:
    t = trajectory(budget={"turn_deadline_s": 0.001})
    nothing = Answer()
    for sampled in ((), (20,), ()):
        assert turn(t, sampled, "turn_deadline", cut_ends=False) is None, "one may be the queue's fault"
        assert t.answer(nothing, fixed_turns=False) is None
    end = turn(t, (), "turn_deadline", cut_ends=False)
    assert end is not None
    assert end.truncation is not None
    assert (end.reason, end.truncation.limit, end.truncation.value) == ("length", "turn_deadline_s", 0.001)


@pytest.mark.parametrize(
    ("observation", "fits"), [(0, True), (58, True), (59, True), (60, False), (61, False), (10**6, False)]
)
def test_an_observation_is_appended_whole_or_not_at_all(observation: int, fits: bool) -> None:
    t = trajectory()
    turn(t, (EOS,))
    end = t.answer(Answer(glue=ids(90), observation=np.full(observation, 30, np.int32)), fixed_turns=False)
    assert t.length == (4 + 1 + observation if fits else 4)
    assert (end is None) == fits
    if end is not None:
        assert end.truncation is not None
        assert (end.reason, end.truncation.limit) == ("context_overflow", "max_context")


def test_an_exact_fit_is_kept_but_leaves_no_room_for_a_turn() -> None:
    t = trajectory()
    turn(t, (EOS,))
    assert t.answer(Answer(observation=np.full(60, 30, np.int32)), fixed_turns=False) is None
    end = t.before_turn(0)
    assert end is not None
    assert end.reason == "context_overflow"
    assert len(record(t, end).segments[0].token_ids) == 64


def test_a_turn_that_stops_exactly_at_the_limit_has_stopped() -> None:
    t = trajectory(sampling={"max_tokens": None})
    assert turn(t, (20,) * 60 + (EOS,)) is None
    assert t.answer(Answer(done=True), fixed_turns=False) == End("env_done")


def test_an_observation_over_max_total_tokens_names_that_limit() -> None:
    t = trajectory(budget={"max_total_tokens": 6})
    turn(t, (EOS,))
    end = t.answer(Answer(observation=ids(1, 2, 3)), fixed_turns=False)
    assert end is not None
    assert end.reason == "max_total_tokens"


def test_the_last_turn_allowed_is_answered_and_nothing_follows_it() -> None:
    t = trajectory(budget={"max_turns": 1})
    turn(t, (EOS,))
    assert t.answer(Answer(observation=ids(30), reward=1.0), fixed_turns=False) == End("max_turns")
    assert t.length == 4
    assert turns(t)[0].reward == 1.0


@pytest.mark.parametrize("max_turns", [None, 10**6])
def test_an_episode_without_an_end_ends_while_its_record_can_be_read(
    max_turns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn takes its place in the header, however many a client allows."""
    monkeypatch.setattr("rollout.trajectory.trajectory.MAX_TURNS", 2)
    t = trajectory(budget={"max_turns": max_turns})
    assert turn(t, (20,)) is None
    assert t.answer(Answer(reward=1 / 3), fixed_turns=False) is None
    assert turn(t, (20,)) is None
    end = t.answer(Answer(reward=1 / 3), fixed_turns=False)
    assert end == End("length", Truncation(limit="max_turns", value=2))
    made = record(t, end)
    (segment,) = made.segments
    large = segment.turns[-1].model_copy(update={"stop": "x" * 512})
    longest = segment.model_copy(update={"turns": (large,) * MAX_TURNS})
    made = made.model_copy(update={"segments": (longest,)})
    frames = [memoryview(bytes(frame)) for frame in encode(TrajectoryDone(id="1", record=made))]
    sent = decode_reply(frames, Limits())
    assert isinstance(sent, TrajectoryDone)
    assert len(sent.record.segments[0].turns) == MAX_TURNS


def test_done_on_the_last_turn_allowed_is_done() -> None:
    t = trajectory(budget={"max_turns": 1})
    turn(t, (EOS,))
    assert t.answer(Answer(done=True), fixed_turns=False) == End("env_done")


@pytest.mark.parametrize(("reason", "expected"), [("stop", "stop"), ("length", "length"), ("turn_deadline", "length")])
def test_a_script_ends_the_way_its_last_turn_does(reason: Any, expected: str) -> None:
    t = trajectory(sampling={"max_tokens": 1}, budget={"turn_deadline_s": 1.0})
    turn(t, (20,), reason, cut_ends=False)
    end = t.answer(Answer(done=True), fixed_turns=True)
    assert end is not None
    assert end.reason == expected
    assert (end.truncation is not None) == (expected == "length")


def test_a_prompt_without_room_never_reaches_the_engine() -> None:
    t = trajectory(prompt=tuple(range(3, 67)))
    end = t.before_turn(0)
    assert end is not None
    assert end.reason == "context_overflow"
    assert record(t, end).segments[0].turns == ()


@pytest.mark.parametrize(("serving", "stale"), [(3, False), (5, False), (6, True)])
def test_staleness_counts_from_the_oldest_sampled_token(serving: int, stale: bool) -> None:
    t = trajectory(max_staleness=2)
    assert t.before_turn(1000) is None, "nothing was sampled yet"
    turn(t, (20, EOS), version=3)
    t.answer(Answer(), fixed_turns=False)
    turn(t, (20, EOS), version=4)
    t.answer(Answer(), fixed_turns=False)
    assert t.before_turn(serving) == (End("abort_stale") if stale else None)


# What the engine may say.


@pytest.mark.parametrize("reason", ["abort_client", "abort_weight_update"])
def test_an_aborted_turn_ends_the_trajectory_with_what_it_has(reason: Any) -> None:
    t = trajectory()
    assert turn(t, (20, 21), reason) == End(reason)
    result = record(t, End(reason))
    assert result.status == "aborted"
    assert result.segments[0].loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert result.segments[0].turns[0].finish_reason == reason


def test_a_turn_that_goes_on_asks_for_its_rest_and_says_what_it_began() -> None:
    t = trajectory()
    assert turn(t, (20, EOS)) is None
    assert t.answer(Answer(), fixed_turns=False) is None
    assert (t.request().begun, t.request().max_tokens) == (0, 8), "the turn before it is another one"
    assert turn(t, (21, 22, 23), "abort_client") == End("abort_client")
    assert t.cut
    assert (t.request().begun, t.request().max_tokens, t.request().id) == (3, 5, "s/t/1")
    assert turn(t, (24, EOS), "stop") is None
    assert not t.cut
    assert [(x.index, x.start, x.length) for x in turns(t)] == [(0, 3, 2), (1, 5, 5)]


@pytest.mark.parametrize(
    ("code", "reason", "scope"),
    [
        ("numerical_error", "numerical_error", "trajectory"),
        ("prompt_too_long", "error", "trajectory"),
        ("engine_dead", "error", "worker"),
        ("never heard of", "error", "trajectory"),
    ],
)
def test_an_error_keeps_the_tokens_and_says_what_happened(code: str, reason: str, scope: str) -> None:
    t = trajectory()
    end = turn(t, (20,), "error", error=Failure(code, "row 3", "token_ids"))
    assert end is not None
    assert end.failure is not None
    assert (end.reason, end.failure.message, end.failure.field) == (reason, "row 3", "token_ids")
    assert (end.failure.stage, end.failure.scope) == ("generate", scope)
    result = record(t, end)
    assert result.segments[0].token_ids.tolist() == [10, 11, 12, 20]
    assert not result.segments[0].loss_mask.any()


def test_a_refused_turn_without_arrays_is_reported_as_what_it_is() -> None:
    t = trajectory()
    request = t.request()
    end = t.take(request, refused(request, "bad_request", "stop_ids"), Times(), ends_when_cut=True)
    assert end is not None
    assert end.failure is not None
    assert (end.failure.code, end.failure.message) == ("bad_request", "stop_ids")


BROKEN: dict[str, dict[str, Any]] = {
    "no logprobs": {"logprobs": {}},
    "a mode is missing": {"logprobs": {"processed": np.zeros(2, np.float32)}},
    "one logprob too few": {"logprobs": {"processed": np.zeros(1, np.float32), "raw": np.zeros(2, np.float32)}},
    "NaN": {"logprobs": {"processed": np.full(2, np.nan, np.float32), "raw": np.zeros(2, np.float32)}},
    "versions too short": {"weight_versions": ((0, 1),)},
    "no versions": {"weight_versions": ()},
    "no alternatives": {"top_ids": None},
    "alternatives too narrow": {"top_logprobs": np.zeros((2, 1), np.float32)},
    "no prompt logprobs": {"prompt_logprobs": None},
    "prompt logprobs too short": {"prompt_logprobs": {"processed": np.zeros(2, np.float32)}},
    "int64 ids": {"token_ids": np.array([20, 21])},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_reply_whose_lengths_differ_is_an_error_and_never_mended(name: str) -> None:
    t = trajectory(sampling={"logprobs": ("processed", "raw"), "top_logprobs": 2, "prompt_logprobs": True})
    request = t.request()
    reply: Completion = replace(completed(request, (20, 21)), **BROKEN[name])
    end = t.take(request, reply, Times(), ends_when_cut=True)
    assert end is not None
    assert end.failure is not None
    assert (end.reason, end.failure.code) == ("error", "internal")
    result = record(t, end)
    assert result.status == "failed"
    assert result.segments[0].token_ids.tolist() == [10, 11, 12], "tokens without logprobs were kept"


def test_cached_and_computed_tokens_are_those_of_turns_that_began() -> None:
    t = trajectory()
    request = t.request()
    reply = replace(completed(request, (EOS,)), cached_tokens=2, computed_tokens=1, times=EngineTimes(prefill=0.1))
    t.take(request, reply, Times(), ends_when_cut=True)
    assert (turns(t)[0].cached_tokens, turns(t)[0].computed_tokens) == (2, 1)
    t = trajectory()
    turn(t, (), "abort_client")
    assert (turns(t)[0].cached_tokens, turns(t)[0].computed_tokens) == (0, 0)


def test_a_stop_string_is_named() -> None:
    t = trajectory(sampling={"stop": ("STOP",)})
    request = t.request()
    t.take(request, replace(completed(request, (20,)), stop=b"STOP"), Times(), ends_when_cut=True)
    assert turns(t)[0].stop == "STOP"


def test_tokens_sampled_elsewhere_count_in_the_penalties_and_not_in_the_loss() -> None:
    source = np.array([SOURCE_PROMPT, SOURCE_SAMPLED, SOURCE_OBSERVATION], np.uint8)
    t = trajectory(prompt_source=source)
    request = t.request()
    assert request.sampled is not None
    assert request.sampled.tolist() == [False, True, False]
    turn(t, (EOS,))
    (segment,) = record(t, End("env_done")).segments
    assert segment.source.tolist() == [SOURCE_PROMPT, SOURCE_PREFIX, SOURCE_OBSERVATION, SOURCE_SAMPLED]
    assert segment.loss_mask.tolist() == [0, 0, 0, 1]


def test_the_wait_for_the_environment_belongs_to_the_turn_before_it() -> None:
    t = trajectory()
    request = t.request()
    t.take(request, completed(request, (EOS,)), Times(decode=0.5), ends_when_cut=True)
    t.waited(0.25)
    t.answer(Answer(reward=1.0), fixed_turns=False)
    assert turns(t)[0].times == Times(decode=0.5, tool_wait=0.25)
    assert turns(t)[0].reward == 1.0


def test_what_an_environment_sees_of_a_turn_cannot_be_written() -> None:
    t = trajectory()
    turn(t, (20, EOS))
    seen = t.last_turn()
    assert (seen.token_ids.tolist(), seen.logprobs.tolist(), seen.total_len) == ([20, EOS], [-0.125, -0.25], 5)
    with pytest.raises(ValueError, match="read-only"):
        seen.token_ids[0] = 1


# Any walk through the machine.

MOVES = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.sampled_from(["stop", "length", "turn_deadline"]),
        st.one_of(st.none(), st.integers(0, 10)),
        st.one_of(st.none(), st.integers(0, 10)),
        st.one_of(st.none(), st.integers(1, 12)),
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(moves=MOVES, total=st.one_of(st.none(), st.integers(1, 70)), max_turns=st.one_of(st.none(), st.integers(1, 5)))
def test_any_walk_ends_within_its_budgets_and_only_ever_appends(
    moves: list[Any], total: int | None, max_turns: int | None
) -> None:
    t = trajectory(budget={"max_total_tokens": total, "max_turns": max_turns, "turn_deadline_s": 1.0})
    ceiling = min(total or 64, 64)
    before: list[int] = [10, 11, 12]
    sampled_count = 0
    end: End | None = None
    for wanted, reason, glue, observation, max_tokens in moves:
        if (end := t.before_turn(0)) is not None:
            break
        request: Request = t.request()
        assert request.max_tokens >= 1
        assert len(request.token_ids) + request.max_tokens <= ceiling
        assert request.token_ids[: len(before)].tolist() == before, "history was rewritten"
        count = request.max_tokens if reason == "length" else min(max(wanted, 1), request.max_tokens)
        sampled_count += count
        end = t.take(request, completed(request, (20,) * count, reason), Times(), ends_when_cut=False)
        before = [*request.token_ids.tolist(), *(20,) * count]
        if end is not None:
            break
        parts = (None if n is None else np.full(n, 30, np.int32) for n in (glue, observation))
        end = t.answer(Answer(*parts, max_tokens=max_tokens), fixed_turns=False)
        if end is not None:
            break
    result = record(t, end or End("env_done"))
    (segment,) = result.segments
    assert segment.token_ids[: len(before)].tolist() == before
    assert len(segment.token_ids) <= max(ceiling, 3)
    assert segment.loss_mask.sum() == sampled_count
    assert (segment.loss_mask == (segment.source == SOURCE_SAMPLED)).all()
    assert not segment.logprobs[segment.loss_mask == 0].any()
    assert sum(turn.length for turn in segment.turns) == sampled_count
    assert max_turns is None or len(segment.turns) <= max_turns


# Branches: the conversation rendered anew.


def branched(t: Trajectory, *history: int, **changes: Any) -> End | None:
    return t.answer(Answer(branch=ids(*history), **changes), fixed_turns=False)


def test_a_branch_is_a_segment_of_its_own() -> None:
    t = trajectory()
    assert turn(t, (20, 21, EOS), version=3) is None
    assert branched(t, 10, 40, EOS, glue=ids(90), observation=ids(30), opening=ids(91), reward=0.5) is None
    assert t.length == 6
    assert turn(t, (22, EOS), version=4) is None
    result = record(t, End("env_done"))
    first, second = result.segments
    assert first.token_ids.tolist() == [10, 11, 12, 20, 21, EOS]
    assert second.token_ids.tolist() == [10, 40, EOS, 90, 30, 91, 22, EOS]
    p, g, o, s = SOURCE_PREFIX, SOURCE_GLUE, SOURCE_OBSERVATION, SOURCE_SAMPLED
    assert second.source.tolist() == [p, p, p, g, o, g, s, s]
    assert second.loss_mask.tolist() == [0] * 6 + [1, 1]
    assert not second.logprobs[:6].any()
    assert (first.weight_versions.tolist(), second.weight_versions.tolist()) == ([[3, 3]], [[4, 2]])
    assert [(turn.index, turn.start, turn.reward) for turn in (*first.turns, *second.turns)] == [
        (0, 3, 0.5),
        (1, 6, None),
    ]


def test_a_branch_is_asked_for_as_a_new_sequence_with_noise_of_its_own() -> None:
    t = trajectory(sampling={"max_tokens": 8, "presence_penalty": 1.0})
    assert turn(t, (20, 21)) is None
    assert t.request().params.segment == 0
    assert branched(t, 50, 51) is None
    request = t.request()
    assert request.token_ids.tolist() == [50, 51]
    assert request.sampled is None
    assert (request.params.segment, request.id[-2:]) == (1, "/1")


def test_a_branch_that_does_not_fit_changes_nothing() -> None:
    t = trajectory(budget={"max_total_tokens": 8})
    assert turn(t, (20, 21), "stop") is None
    end = branched(t, *range(9))
    assert end is not None
    assert end.reason == "max_total_tokens"
    (segment,) = record(t, end).segments
    assert segment.token_ids.tolist() == [10, 11, 12, 20, 21]
    # A whole one that fits is taken, though the two together would not.
    t = trajectory(budget={"max_total_tokens": 8})
    assert turn(t, (20, 21), "stop") is None
    assert branched(t, *range(7)) is None


def test_there_are_only_so_many_segments() -> None:
    t = trajectory()
    ends = []
    for _ in range(MAX_SEGMENTS):
        assert turn(t, (20, EOS)) is None
        ends.append(branched(t, 40, 41))
    assert ends[:-1] == [None] * (MAX_SEGMENTS - 1)
    assert ends[-1] == End("length", Truncation(limit="max_segments", value=MAX_SEGMENTS))
    assert len(record(t, ends[-1]).segments) == MAX_SEGMENTS


def test_a_segment_in_which_nothing_was_sampled_is_left_out() -> None:
    t = trajectory()
    assert record(t, End("abort_client")).segments[0].token_ids.tolist() == [10, 11, 12]
    assert turn(t, (20, EOS)) is None
    assert branched(t, 40, 41) is None
    (segment,) = record(t, End("abort_client")).segments
    assert segment.token_ids.tolist() == [10, 11, 12, 20, EOS]


def test_staleness_counts_from_the_oldest_segment() -> None:
    t = trajectory(max_staleness=1)
    assert turn(t, (20, EOS), version=0) is None
    assert branched(t, 40, 41) is None
    assert t.before_turn(1) is None
    assert t.before_turn(2) == End("abort_stale")


def test_a_failed_trajectory_is_masked_in_all_its_segments() -> None:
    t = trajectory()
    assert turn(t, (20, EOS)) is None
    assert branched(t, 40, 41) is None
    assert turn(t, (21, EOS)) is None
    failed = record(t, End("env_error", failure=Internal("no", scope="trajectory").failure("step")))
    assert [segment.loss_mask.any() for segment in failed.segments] == [False, False]


@pytest.mark.parametrize(("reason", "becomes"), [("stop", "tool_calls"), ("length", "length")])
def test_a_turn_that_called_says_so(reason: Any, becomes: str) -> None:
    t = trajectory()
    assert turn(t, (20,) * 8, reason, cut_ends=False) is None
    assert t.answer(Answer(called=True, observation=ids(1)), fixed_turns=False) is None
    assert record(t, End("env_done")).segments[0].turns[0].finish_reason == becomes
