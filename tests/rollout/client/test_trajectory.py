"""The view that a trainer reads."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from protocols import (
    SOURCE_GLUE,
    SOURCE_OBSERVATION,
    SOURCE_PREFIX,
    SOURCE_PROMPT,
    SOURCE_SAMPLED,
    Record,
    Sampling,
    Segment,
    Turn,
)
from rollout.client import ClientClosed, Trajectory

SOURCES = [SOURCE_PROMPT] * 2 + [SOURCE_SAMPLED] * 3 + [SOURCE_GLUE] + [SOURCE_OBSERVATION] * 2 + [SOURCE_SAMPLED] * 2


def segment(sources: list[int], runs: list[list[int]], turns: tuple[Turn, ...]) -> Segment:
    source = np.array(sources, np.uint8)
    sampled = source == SOURCE_SAMPLED
    return Segment(
        token_ids=np.arange(100, 100 + len(source), dtype=np.int32),
        source=source,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        loss_mask=sampled.astype(np.uint8),
        weight_versions=np.array(runs, np.int64).reshape(-1, 2),
        kv_versions=np.array(runs, np.int64).reshape(-1, 2),
        turns=turns,
    )


def view(*segments: Segment, acks: list[str] | None = None) -> Trajectory:
    record = Record(
        trajectory_id="t",
        group_id="g",
        batch_id="b",
        sample_index=3,
        status="completed",
        finish_reason="env_done",
        segments=segments,
        sampling=Sampling(seed=9),
        reward=0.5,
        rewards={"format": 0.25},
        metadata={"task": 1},
        wall_s=2.0,
    )
    return Trajectory(record, (acks if acks is not None else []).append)


TURNS = (
    Turn(index=0, start=2, length=3, finish_reason="tool_calls"),
    Turn(index=1, start=8, length=2, finish_reason="stop"),
)


def test_arrays_of_two_turns() -> None:
    t = view(segment(SOURCES, [[4, 2], [5, 3]], TURNS))
    assert t.prompt_len == 2
    assert t.prompt_ids.tolist() == [100, 101]
    assert t.response_ids.tolist() == [102, 103, 104, 105, 106, 107, 108, 109]
    assert t.response_mask.tolist() == [1, 1, 1, 0, 0, 0, 1, 1]
    assert t.response_logprobs.tolist() == [-0.5, -0.5, -0.5, 0, 0, 0, -0.5, -0.5]
    assert len(t.token_ids) == len(t.source) == len(t.logprobs) == len(t.loss_mask) == 10
    assert t.token_versions.tolist() == [-1, -1, 4, 4, 5, -1, -1, -1, 5, 5]
    assert (t.weight_version_min, t.weight_version_max) == (4, 5)
    assert [turn.index for turn in t.turns] == [0, 1]


def test_record_fields_pass_through() -> None:
    t = view(segment(SOURCES, [[4, 5]], TURNS))
    for name in Record.model_fields:
        assert getattr(t, name) == getattr(t.record, name)
    assert t.ok
    assert t.sampling.seed == 9
    assert "10 tokens, 2 turn(s), reward=0.5" in repr(t)


def test_nothing_sampled_is_all_prompt() -> None:
    t = view(segment([SOURCE_PROMPT] * 3, [], ()))
    assert (t.prompt_len, len(t.prompt_ids), len(t.response_ids)) == (3, 3, 0)
    assert (t.weight_version_min, t.weight_version_max) == (None, None)
    assert t.token_versions.tolist() == [-1, -1, -1]


def test_of_several_segments_the_last_is_shown_and_all_turns_count() -> None:
    last = segment(
        [SOURCE_PREFIX] * 4 + [SOURCE_SAMPLED] * 2, [[7, 2]], (Turn(index=2, start=4, length=2, finish_reason="stop"),)
    )
    t = view(segment(SOURCES, [[4, 5]], TURNS), last)
    assert t.response_ids.tolist() == [104, 105]
    assert [turn.index for turn in t.turns] == [0, 1, 2]
    assert (t.weight_version_min, t.weight_version_max) == (4, 7)
    assert len(t.segments) == 2


def test_acknowledging_names_the_trajectory() -> None:
    acks: list[str] = []
    view(segment(SOURCES, [[4, 5]], TURNS), acks=acks).ack()
    assert acks == ["t"]


def test_it_is_a_view() -> None:
    t = view(segment(SOURCES, [[4, 5]], TURNS))
    assert np.shares_memory(t.response_ids, t.record.segments[0].token_ids)
    with pytest.raises(AttributeError):
        t.reward = 1.0  # type: ignore[misc]


def test_a_pickled_copy_reads_the_same_but_does_not_acknowledge() -> None:
    t = view(segment(SOURCES, [[4, 5]], TURNS))
    copy = pickle.loads(pickle.dumps(t))
    assert copy.record == t.record
    assert copy.response_ids.tolist() == t.response_ids.tolist()
    with pytest.raises(ClientClosed, match="original"):
        copy.ack()
