"""What is handed back: by the worker's ids what it kept, with its record what it returned."""

from __future__ import annotations

import numpy as np
import pytest

from protocols.errors import BadRequest
from protocols.fields import Group, Partial, Record, Sampling, Segment, Times
from rollout.client.resumption import merged, resumption
from rollout.client.trajectory import Trajectory


def group(*names: str, indices: tuple[int, ...] | None = None, name: str = "g", counted: int = 0) -> Group:
    prompt = np.array([1], np.int32)
    return Group(id=name, prompt=prompt, trajectory_ids=names, sample_indices=indices, counted=counted)


def returned(of: Group, name: str, index: int, partial: Partial | None = Partial()) -> Trajectory:  # noqa: B008
    nothing = np.zeros((0, 2), np.int64)
    segment = Segment(
        token_ids=of.prompt,
        source=np.zeros(1, np.uint8),
        logprobs=np.zeros(1, np.float32),
        loss_mask=np.zeros(1, np.uint8),
        weight_versions=nothing,
        kv_versions=nothing,
        turns=(),
    )
    record = Record(
        trajectory_id=name,
        group_id=of.id,
        batch_id="b",
        sample_index=index,
        status="aborted",
        finish_reason="abort_surplus",
        segments=(segment,),
        sampling=Sampling(seed=9),
        metadata={},
        times=Times(),
        wall_s=0.0,
        partial=partial,
    )
    return Trajectory(record, lambda _: None, of)


def test_what_is_neither_is_refused_by_its_place() -> None:
    """A record alone has lost its group."""
    whole = group("g.0")
    with pytest.raises(BadRequest, match="not Record") as refused:
        resumption([whole, returned(whole, "g.0", 0).record])  # type: ignore[list-item]
    assert refused.value.field == "resume[1]"


def test_kept_groups_stay_and_returned_trajectories_are_gathered_into_theirs() -> None:
    whole = group("g.0", "g.1", "g.2", counted=1)
    kept = group("k.0", name="k", counted=2)
    other = group("o.0", name="o")
    some = [returned(whole, "g.2", 2), returned(other, "o.0", 2**20), returned(whole, "g.0", 0)]
    resumed, again, records = resumption([some[0], kept, *some[1:]])
    assert resumed == (kept,)
    assert [(each.id, each.trajectory_ids, each.sample_indices) for each in again] == [
        ("g", ("g.2", "g.0"), (2, 0)),
        ("o", ("o.0",), (2**20,)),
    ]
    assert [each.sampling.seed for each in again] == [9, 9], "that of the noise that they were sampled with"
    assert [each.counted for each in again] == [0, 0], "what ended in the batch before counts there"
    assert [record.trajectory_id for record in records] == ["g.2", "o.0", "g.0"]


def test_what_cannot_go_on_is_refused_by_its_place() -> None:
    whole = group("g.0", "g.1")
    with pytest.raises(BadRequest, match=r"g\.1 cannot go on: it is aborted \(abort_surplus\)") as refused:
        resumption([returned(whole, "g.0", 0), returned(whole, "g.1", 1, None)])
    assert refused.value.field == "resume[1]"


def test_groups_of_one_id_are_one_and_others_stay_as_they_are() -> None:
    first, other, second = group("g.0", "g.1"), group("h.0", name="h"), group("g.7", indices=(7,))
    one, same = merged((first, other, second))
    assert (one.id, one.trajectory_ids, one.sample_indices) == ("g", ("g.0", "g.1", "g.7"), (0, 1, 7))
    assert same is other
