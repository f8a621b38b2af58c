"""Rules of single requests that go beyond the type of a field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from protocols import (
    CommitWeightsRequest,
    Continue,
    Drain,
    Group,
    Limits,
    PrepareWeightsRequest,
    Sampling,
    Score,
    SubmitBatch,
    bad_request,
    decode_request,
    encode,
)
from protocols.codec import REQUESTS
from tests.protocols.samples import ids, marks


def refused_field(model: type, **fields: Any) -> str | None:
    with pytest.raises(ValidationError) as caught:
        model(id="1", **fields)
    return bad_request(caught.value).field


def group(name: str, *trajectories: str) -> Group:
    return Group(id=name, prompt=ids(1), trajectory_ids=trajectories)


def test_all_requests_of_the_design_exist() -> None:
    words = "hello submit continue cancel ack prepare_weights commit_weights abort_weights pause resume sleep wake"
    assert set(REQUESTS) == {*words.split(), "score", "status", "drain", "ping"}


def test_ids_are_unique_over_a_submit() -> None:
    two = (group("g", "a"), group("g", "b"))
    assert refused_field(SubmitBatch, batch_id="b", groups=two) == "groups[1].id"
    shared = (group("g", "a", "b"), group("h", "c"), group("i", "d", "a"))
    assert refused_field(SubmitBatch, batch_id="b", groups=shared) == "groups[2].trajectory_ids"
    assert refused_field(SubmitBatch, batch_id="b", groups=()) == "groups"


def test_no_more_groups_are_needed_than_there_are() -> None:
    assert refused_field(SubmitBatch, batch_id="b", groups=(group("g", "a"),), groups_needed=2) == "groups_needed"


@pytest.mark.parametrize("opening", [{"glue": ids(1)}, {"observation": ids()}, {"max_tokens": 5}])
def test_a_last_answer_opens_no_turn(opening: dict[str, Any]) -> None:
    answer = {"trajectory_id": "t", "turn": 0, "expected_len": 3}
    (name,) = opening
    assert refused_field(Continue, **answer, **opening, done=True) == name
    Continue(id="1", **answer, **opening)


@pytest.mark.parametrize("final", [{"reward": 0.0}, {"rewards": {"a": 1.0}}])
def test_the_reward_of_the_trajectory_comes_with_its_end(final: dict[str, Any]) -> None:
    answer = {"trajectory_id": "t", "turn": 0, "expected_len": 3}
    (name,) = final
    assert refused_field(Continue, **answer, **final) == name
    Continue(id="1", **answer, **final, done=True)
    Continue(id="1", **answer, turn_reward=1.0)


@pytest.mark.parametrize("name", ["", "a" * 257])
def test_a_reward_has_a_name_that_a_record_takes(name: str) -> None:
    """Else the trajectory would fail with its answer taken."""
    answer = {"trajectory_id": "t", "turn": 0, "expected_len": 3, "done": True}
    assert (refused_field(Continue, **answer, rewards={name: 1.0}) or "").startswith("rewards.")
    Continue(id="1", **answer, rewards={"a" * 256: 1.0})


def test_a_drain_has_a_timeout() -> None:
    update = {"update_id": "u", "version": 1}
    assert refused_field(CommitWeightsRequest, **update) == "drain_timeout_s"
    assert refused_field(CommitWeightsRequest, **update, drain_timeout_s=0) == "drain_timeout_s"
    assert CommitWeightsRequest(id="1", **update, mode="abort").drain_timeout_s is None
    assert refused_field(Drain, timeout_s=-1) == "timeout_s"


@pytest.mark.parametrize("path", ["", "x" * 5000])
def test_a_weights_path_has_a_length(path: str) -> None:
    assert refused_field(PrepareWeightsRequest, update_id="u", version=1, path=path) == "path"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"sequences": ()}, "sequences"),
        ({"sequences": (ids(1), ids())}, "sequences[1]"),
        ({"sequences": (ids(1),), "sampled": ()}, "sampled"),
        ({"sequences": (ids(1), ids(2, 3)), "sampled": (marks(0), marks(0))}, "sampled[1]"),
        ({"sequences": (ids(1),), "sampled": (marks(2),)}, "sampled[0]"),
    ],
)
def test_sequences_to_score_and_their_marks_agree(fields: dict[str, Any], path: str) -> None:
    assert refused_field(Score, **fields) == path


def test_a_request_that_was_built_is_accepted() -> None:
    batch = SubmitBatch(id="1", batch_id="b", groups=(group("g", "a", "b"), group("h", "c")))
    assert decode_request(encode(batch), Limits()) == batch


@pytest.mark.parametrize(
    ("law", "says"),
    [
        ({"top_p": 0}, "must be greater than 0, not 0 [top_p]"),
        ({"top_k": 2.5}, "must be a valid integer, not 2.5 [top_k]"),
        ({"ignore_eos": 1}, "must be a valid boolean, not 1 [ignore_eos]"),
        ({"logprobs": ["all"]}, "must be 'processed', 'temperature' or 'raw', not 'all' [logprobs[0]]"),
        ({"seed": "x" * 100}, f"must be a valid integer, not '{'x' * 40}' [seed]"),
        ({"seed": 10**5000}, f"must be less than {2**64} [seed]"),
        ({"stop_ids": [None]}, "must be a valid integer [stop_ids[0]]"),
    ],
)
def test_a_refusal_says_what_was_given(law: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Sampling(**law)
    assert str(bad_request(caught.value)) == says
