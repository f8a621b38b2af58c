"""The arrays of each segment: parallel, sourced, scored, and those of a record taken up as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.request import Completion
from protocols.fields import (
    SOURCE_GLUE,
    SOURCE_OBSERVATION,
    SOURCE_PREFIX,
    SOURCE_PROMPT,
    SOURCE_SAMPLED,
    Segment,
    Turn,
)
from rollout.trajectory.segments import Segments
from tests.rollout.build import ids

P, S, G, B, X = SOURCE_PROMPT, SOURCE_SAMPLED, SOURCE_GLUE, SOURCE_OBSERVATION, SOURCE_PREFIX


def segments(*modes: Any, source: tuple[int, ...] | None = None) -> Segments:
    return Segments(modes or ("processed",), ids(10, 11), None if source is None else np.array(source, np.uint8))


def sampled(*values: int, versions: tuple[tuple[int, int], ...], kv: int, modes: Any = ("processed",)) -> Completion:
    """Token i of the n-th mode has logprob -i - n / 2."""
    base = -np.arange(1, len(values) + 1, dtype=np.float32)
    return Completion(
        "r",
        "stop",
        ids(*values),
        {mode: base - np.float32(n / 2) for n, mode in enumerate(modes)},
        weight_versions=versions,
        kv_version=kv,
    )


def turn(index: int, start: int, length: int) -> Turn:
    return Turn(index=index, start=start, length=length, finish_reason="stop")


def values(s: Segments, *turns: Turn, trainable: bool = True, whole: bool = False) -> tuple[Segment, ...]:
    return s.values(turns, trainable=trainable, whole=whole)


def two() -> tuple[Segments, tuple[Turn, ...]]:
    """Two turns, a branch, a third one."""
    modes = ("processed", "raw")
    s = segments(*modes)
    s.now.add_sampled(sampled(20, 21, versions=((3, 1), (4, 1)), kv=3, modes=modes))
    s.now.add(ids(90), G)
    s.now.add(ids(30, 31), B)
    s.now.add_sampled(sampled(22, versions=((4, 1),), kv=4, modes=modes))
    s.branch(2)
    s.now.add(ids(10, 40), X)
    s.now.add(ids(32), B)
    s.now.add_sampled(sampled(23, 24, versions=((5, 2),), kv=5, modes=modes))
    return s, (turn(0, 2, 2), turn(1, 7, 1), turn(2, 3, 2))


def test_sources_masks_logprobs_and_versions_lie_beside_the_ids() -> None:
    s, turns = two()
    first, second = values(s, *turns)
    assert first.token_ids.tolist() == [10, 11, 20, 21, 90, 30, 31, 22]
    assert first.source.tolist() == [P, P, S, S, G, B, B, S]
    assert first.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert first.logprobs.tolist() == [0, 0, -1, -2, 0, 0, 0, -1]
    assert first.more_logprobs["raw"].tolist() == [0, 0, -1.5, -2.5, 0, 0, 0, -1.5]
    assert first.weight_versions.tolist() == [[3, 1], [4, 2]]
    assert first.kv_versions.tolist() == [[3, 2], [4, 1]]
    assert first.turns == turns[:2]
    assert second.token_ids.tolist() == [10, 40, 32, 23, 24]
    assert second.source.tolist() == [X, X, B, S, S]
    assert second.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert second.weight_versions.tolist() == [[5, 2]]
    assert second.turns == turns[2:]
    dtypes = {name: array.dtype.name for name, array in first if isinstance(array, np.ndarray)}
    assert dtypes == {
        "token_ids": "int32",
        "source": "uint8",
        "logprobs": "float32",
        "loss_mask": "uint8",
        "weight_versions": "int64",
        "kv_versions": "int64",
    }


def test_nothing_of_a_failed_one_is_trained_on_and_all_of_it_is_there() -> None:
    s, turns = two()
    for kept, masked in zip(values(s, *turns), values(s, *turns, trainable=False), strict=True):
        assert not masked.loss_mask.any()
        np.testing.assert_array_equal(kept.logprobs, masked.logprobs)
        np.testing.assert_array_equal(kept.source, masked.source)


def test_the_oldest_version_is_that_of_all_segments() -> None:
    s = segments()
    assert s.oldest_version is None
    s, _ = two()
    assert (s.oldest_version, s.now.oldest_version, s.index) == (3, 5, 1)


def test_a_segment_without_turns_is_said_only_where_the_whole_is_asked_for() -> None:
    s = segments()
    assert len(values(s)) == 1, "the first one always is: it holds the prompt"
    s.now.add_sampled(sampled(20, versions=((0, 1),), kv=0))
    s.branch(1)
    s.now.add(ids(10, 40), X)
    assert [segment.token_ids.tolist() for segment in values(s, turn(0, 2, 1))] == [[10, 11, 20]]
    assert [segment.token_ids.tolist() for segment in values(s, turn(0, 2, 1), whole=True)] == [[10, 11, 20], [10, 40]]


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_record_holds_is_taken_up_as_it_was(whole: bool) -> None:
    s, turns = two()
    before = values(s, *turns, whole=whole)
    again = segments("processed", "raw")
    again.restore(before)
    assert again.index == 1
    for one, other in zip(values(again, *turns), before, strict=True):
        assert one == other
    for grown in (s, again):
        grown.now.add_sampled(sampled(25, versions=((5, 1),), kv=4, modes=("processed", "raw")))
    (_, one), (_, other) = values(s, *turns), values(again, *turns)
    assert one == other
    assert one.weight_versions.tolist() == [[5, 3]]
    assert one.kv_versions.tolist() == [[5, 2], [4, 1]]


def test_a_segment_that_had_only_begun_is_taken_up_too() -> None:
    s = segments()
    s.now.add_sampled(sampled(20, versions=((0, 1),), kv=0))
    s.branch(1)
    s.now.add(ids(10, 40), X)
    again = segments()
    again.restore(values(s, turn(0, 2, 1), whole=True))
    assert (again.index, again.now.ids.tolist()) == (1, [10, 40])
    assert again.now.sampled is None


def test_what_a_prompt_had_sampled_elsewhere_is_counted_and_not_trained_on() -> None:
    s = segments(source=(P, S))
    assert s.now.sampled.tolist() == [False, True]
    (segment,) = values(s)
    assert segment.source.tolist() == [P, X]
    assert segment.loss_mask.tolist() == [0, 0]


def test_what_was_handed_out_never_changes() -> None:
    s = segments()
    early = s.now.ids
    s.now.add(ids(1, 2), B)
    later = s.now.ids
    s.branch(0)
    s.now.add(ids(9), X)
    assert (early.tolist(), later.tolist()) == ([10, 11], [10, 11, 1, 2])
    with pytest.raises(ValueError, match="read-only"):
        later[0] = 5


def test_lengths_that_disagree_are_refused() -> None:
    s = segments()
    s.now.add_sampled(sampled(20, 21, versions=((0, 1),), kv=0))
    with pytest.raises(ValueError, match="must count 2 sampled tokens"):
        values(s, turn(0, 2, 2))
