from __future__ import annotations

import math

import pytest

from protocols.fields import Record
from rollout.metrics.names import FINISH, NAMES
from rollout.metrics.observer import Round
from rollout.metrics.rounds import PARTS, Rounds
from tests.rollout.metrics.records import NOW, ROUND, record


def rolled(*ended: tuple[float, Record], version: int = 0, groups: tuple[float, ...] = ()) -> dict[str, float]:
    """The roll-up of trajectories that ended so many seconds after the accept."""
    rounds = Rounds()
    rounds.accept(ROUND, len(ended))
    for seconds, one in ended:
        rounds.add(ROUND, one, version, NOW + seconds)
    for seconds in groups:
        rounds.group_done(ROUND, "g", seconds)
    values = rounds.close(ROUND)
    assert values is not None
    return values


def test_rates_are_over_the_time_from_accept_to_the_last_end() -> None:
    values = rolled((1.0, record(lengths=(3, 2))), (4.0, record(lengths=(15,))))
    assert values["rollout/step"] == 7
    assert values["rollout/round_time_s"] == pytest.approx(4.0)
    assert values["rollout/tokens_per_s"] == pytest.approx(5.0)
    assert values["rollout/trajectories_per_s"] == pytest.approx(0.5)


def test_lengths_and_turns_are_of_those_that_ended_by_themselves() -> None:
    values = rolled(
        (1.0, record("stop", (10,))),
        (1.0, record("length", (20, 30))),
        (1.0, record("abort_client", (1000,))),
        (1.0, record("env_error", (2000,))),
    )
    assert values["rollout/response_len/mean"] == pytest.approx(30)
    assert values["rollout/response_len/p50"] == pytest.approx(30)
    assert values["rollout/response_len/p95"] == pytest.approx(48)
    assert values["rollout/response_len/max"] == 50
    assert (values["rollout/num_turns/mean"], values["rollout/num_turns/max"]) == (1.5, 2)
    assert values["rollout/tokens_per_s"] == pytest.approx(3060), "the machine sampled all of them"


def test_what_turns_after_the_first_had_computed_again() -> None:
    """Two tokens, then 30: one block is full when the second turn comes, for the last token has no KV yet."""

    def of(*cached: int) -> Record:
        made = record("stop", (30, 1, 32))
        (segment,) = made.segments
        turns = tuple(
            turn.model_copy(update={"cached_tokens": n}) for turn, n in zip(segment.turns, cached, strict=True)
        )
        return made.model_copy(update={"segments": (segment.model_copy(update={"turns": turns}),)})

    name = "rollout/recomputed_ratio"
    assert rolled((1.0, of(0, 16, 32)))[name] == 0
    assert rolled((1.0, of(0, 16, 32)), (1.0, of(0, 0, 16)))[name] == pytest.approx(32 / 96)
    assert rolled((1.0, of(0, 0, 0)))[name] == 1
    two = record("stop", (30, 1))
    apart = two.model_copy(update={"segments": (record("stop", (30,)).segments[0], record("stop", (9,)).segments[0])})
    assert name not in rolled((1.0, record("stop", (30,))), (1.0, apart)), "nothing went on"


def test_shares_of_status_and_reason() -> None:
    values = rolled(
        (1.0, record("stop")), (1.0, record("env_done")), (1.0, record("length")), (1.0, record("numerical_error", ()))
    )
    assert values["rollout/truncated_ratio"] == values["rollout/failed_ratio"] == 0.25
    assert values["rollout/aborted_ratio"] == 0
    assert values["rollout/nonfinite_count"] == 1
    reasons = {name: value for name, value in values.items() if name.startswith(FINISH)}
    assert reasons == {f"{FINISH}{reason}": 0.25 for reason in ("stop", "env_done", "length", "numerical_error")}


def test_a_reason_seen_once_is_reported_as_none_in_later_rounds() -> None:
    rounds = Rounds()
    later = Round("session", "later", 8, NOW)
    rounds.add(ROUND, record("length"), 0, NOW + 1)
    rounds.add(later, record("stop"), 0, NOW + 1)
    rounds.close(ROUND)
    values = rounds.close(later)
    assert values is not None
    assert (values[f"{FINISH}length"], values[f"{FINISH}stop"]) == (0, 1)


def test_the_tail_is_the_time_of_the_last_tenth() -> None:
    values = rolled(*[(1.0 + 0.1 * i, record()) for i in range(9)], (10.0, record()))
    assert values["rollout/tail_ratio"] == pytest.approx((10.0 - 1.8) / 10.0)
    assert rolled(*[(5.0, record()) for _ in range(10)])["rollout/tail_ratio"] == 0


def test_times_are_means_and_percentiles_whose_means_sum_to_the_wall_time() -> None:
    first = record(times={"queue": 1.0, "decode": 2.0, "tool_wait": 4.0})
    second = record(times={"queue": 3.0, "prefill": 0.5, "preempted": 0.25, "paused": 0.25})
    values = rolled((7.0, first), (7.0, second))
    assert values["rollout/time/queue_s/mean"] == 2.0
    assert values["rollout/time/queue_s/p95"] == pytest.approx(2.9)
    total = sum(values[f"rollout/time/{part}_s/mean"] for part in PARTS)
    assert total == pytest.approx((first.wall_s + second.wall_s) / 2)


def test_staleness_is_the_serving_version_less_the_oldest_sampled() -> None:
    values = rolled(
        (1.0, record(lengths=(4,), versions=[(3, 2), (5, 2)])),
        (1.0, record(lengths=(4,), versions=[(5, 4)])),
        (1.0, record("abort_client", (), versions=[(0, 0)])),
        version=5,
    )
    assert (values["rollout/staleness/mean"], values["rollout/staleness/max"]) == (1.0, 2)


def test_groups_and_their_completion() -> None:
    values = rolled((1.0, record()), groups=(1.0, 2.0, 6.0))
    assert values["rollout/group_completion_time/mean"] == 3.0
    assert values["rollout/group_completion_time/p90"] == pytest.approx(5.2)
    assert values["rollout/group_completion_time/max"] == 6.0


def test_what_was_cut_as_surplus_is_compared_with_what_was_kept() -> None:
    values = rolled((1.0, record("stop", (10,))), (2.0, record("abort_surplus", (50,))), (2.0, record("abort_client")))
    assert values["rollout/cut/count"] == 1
    assert (values["rollout/cut/kept_len_mean"], values["rollout/cut/cut_len_mean"]) == (10, 50)
    assert "rollout/cut/cut_len_mean" not in rolled((1.0, record()))


def test_evaluation_stays_out() -> None:
    evaluation = record("length", (500,), purpose="eval", group_id="e")
    rounds = Rounds()
    rounds.accept(ROUND, 2)
    rounds.add(ROUND, evaluation, 0, NOW + 50)
    rounds.group_done(ROUND, "e", 50.0)
    rounds.add(ROUND, record("stop", (4,)), 0, NOW + 2)
    rounds.group_done(ROUND, "g", 2.0)
    values = rounds.close(ROUND)
    assert values is not None
    assert values["rollout/round_time_s"] == pytest.approx(2.0)
    assert values["rollout/response_len/max"] == 4
    assert values["rollout/group_completion_time/max"] == 2.0
    assert f"{FINISH}length" not in values
    rounds.add(ROUND, evaluation, 0, NOW + 60)
    assert rounds.close(ROUND) is None, "a round of evaluation alone has no roll-up"


def test_rounds_that_overlap_are_kept_apart_and_each_closes_once() -> None:
    rounds = Rounds()
    other = Round("session", "other", 8, NOW + 1)
    rounds.accept(ROUND, 2)
    rounds.accept(other, 1)
    assert rounds.progress == (7, 0, 2)
    rounds.add(ROUND, record(), 0, NOW + 1)
    rounds.add(other, record(), 0, NOW + 2)
    newer = rounds.close(other)
    rounds.add(ROUND, record(), 0, NOW + 9)
    older = rounds.close(ROUND)
    assert newer is not None
    assert older is not None
    assert (newer["rollout/step"], older["rollout/step"]) == (8, 7), "a late round says which one it is"
    assert older["rollout/round_time_s"] == pytest.approx(9.0)
    assert rounds.close(ROUND) is None
    assert rounds.progress is None


def test_a_round_of_nothing_but_failures_has_finite_numbers() -> None:
    values = rolled((0.0, record("error", (), versions=[(0, 0)])))
    assert all(math.isfinite(value) for value in values.values())
    assert "rollout/response_len/mean" not in values


def test_every_name_is_one_of_the_table() -> None:
    several = record(lengths=(30, 2))
    values = rolled((1.0, several), (1.0, record("abort_surplus")), (1.0, record("numerical_error")), groups=(1.0,))
    known = {name for name in NAMES if name.startswith("rollout/")} | {"rollout/step"}
    found = {f"{FINISH}<reason>" if name.startswith(FINISH) else name for name in values}
    assert found == known - {"rollout/self_logprob_abs_diff"}
