"""A record whose parts disagree cannot be built, at either end."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from pydantic import ValidationError

from protocols import BadRequest, Failure, Limits, Record, Segment, Turn, bad_request, decode_reply, encode
from tests.protocols import samples
from tests.protocols.samples import floats, ids, marks, runs


def refused_field(whole: Segment | Record, **changed: Any) -> str | None:
    with pytest.raises(ValidationError) as caught:
        type(whole)(**{**whole.__dict__, **changed})
    return bad_request(caught.value).field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", marks(0, 0, 1, 3, 1)),
        ("logprobs", floats(0, 0, -0.5, 0, -1.25)),
        ("loss_mask", marks(0, 0, 1, 0, 1, 1, 1)),
        ("token_ids", ids(1)),
    ],
)
def test_arrays_of_a_segment_have_one_length(field: str, value: Any) -> None:
    wrong = refused_field(samples.segment(), **{field: value})
    assert wrong == ("source" if field == "token_ids" else field)


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("more_logprobs", {"raw": floats(0)}, "more_logprobs.raw"),
        ("more_logprobs", {"tempered": floats(*[0] * 6)}, "more_logprobs.tempered.[key]"),
        ("prompt_logprobs", floats(*[0] * 7), "prompt_logprobs"),
        ("logprobs", floats(0, 0, float("nan"), 0, 0, 0), "logprobs"),
        ("logprobs", floats(0, 0, float("-inf"), 0, 0, 0), "logprobs"),
        ("logprobs", floats(0, 0, -1, -1, -1, -1), "logprobs"),
        ("loss_mask", marks(1, 0, 1, 0, 1, 1), "loss_mask"),
        ("loss_mask", marks(0, 0, 2, 0, 1, 1), "loss_mask"),
        ("weight_versions", runs((3, 2)), "weight_versions"),
        ("weight_versions", runs((3, 4)), "weight_versions"),
        ("weight_versions", np.zeros((1, 3), np.int64), "weight_versions"),
        ("kv_versions", runs(), "kv_versions"),
        ("top_ids", None, "top_logprobs"),
        ("top_logprobs", None, "top_logprobs"),
        ("top_logprobs", np.zeros((3, 1), np.float32), "top_logprobs"),
        ("turns", (Turn(index=0, start=5, length=2, finish_reason="stop"),), "turns[0]"),
    ],
)
def test_parts_of_a_segment_agree(field: str, value: Any, path: str) -> None:
    assert refused_field(samples.segment(), **{field: value}) == path


def test_runs_count_nonnegative_tokens() -> None:
    assert refused_field(samples.segment(), weight_versions=runs((3, -1), (4, 4))) == "weight_versions"
    assert refused_field(samples.segment(), kv_versions=runs((3, 2**62), (4, 2**62), (5, 3))) == "kv_versions"


def test_alternatives_have_a_row_for_every_sampled_token() -> None:
    top = {"top_ids": np.zeros((2, 1), np.int32), "top_logprobs": np.zeros((2, 1), np.float32)}
    assert refused_field(samples.segment(), **top) == "top_ids"


def test_a_mismatch_is_refused_by_the_receiver_too() -> None:
    record = samples.record()
    whole = record.segments[0].model_copy(update={"loss_mask": marks(0, 0, 1)})
    sent = samples.REPLIES["trajectory_done"].model_copy(
        update={"record": record.model_copy(update={"segments": (whole,)})}
    )
    with pytest.raises(BadRequest, match=r"has 3 entries for 6 token_ids \[record\.segments\[0\]\.loss_mask\]"):
        decode_reply(encode(sent), Limits())


def test_status_follows_from_the_reason() -> None:
    assert refused_field(samples.record(), status="completed") == "status"
    assert refused_field(samples.record(), finish_reason="env_error") == "status"
    assert refused_field(samples.record(), status="done") == "status"


def test_a_failed_trajectory_says_why_and_trains_nothing() -> None:
    failed = samples.failed_record()
    assert refused_field(failed, error=None) == "error"
    assert refused_field(failed, segments=(samples.segment(),)) == "segments[0].loss_mask"


def test_an_aborted_trajectory_keeps_its_mask() -> None:
    aborted = Record(**{**samples.record().__dict__, "status": "aborted", "finish_reason": "abort_client"})
    assert aborted.segments[0].loss_mask.sum() == 3


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", True])
def test_a_reward_is_a_finite_number_or_nothing(reward: Any) -> None:
    assert refused_field(samples.record(), reward=reward) == "reward"
    assert refused_field(samples.record(), rewards={"a": reward}) == "rewards.a"
    assert Record(**{**samples.record().__dict__, "reward": None}).reward is None


def test_no_reward_is_nil_on_the_wire_and_not_zero() -> None:
    bare = Record(**{**samples.record().__dict__, "reward": None})
    assert msgpack.unpackb(encode(bare)[0])["reward"] is None


def test_a_failure_names_known_scopes_only() -> None:
    with pytest.raises(ValidationError):
        Failure(code="internal", message="", scope="everything")  # type: ignore[arg-type]
