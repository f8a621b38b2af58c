"""The strict base model, arrays, and opaque maps, as Python code meets them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protocols import Group, Hello, Record, Sampling, Score, decode_request, encode
from protocols.limits import Limits
from tests.protocols import samples
from tests.protocols.samples import floats, ids


def group(**fields: Any) -> Group:
    return Group(id="g", prompt=ids(1, 2), trajectory_ids=("t",), **fields)


def test_python_code_may_use_lists_and_numpy_scalars() -> None:
    sampling = Sampling(stop=["a"], stop_ids=[np.int64(3)], temperature=np.float32(0.5), top_k=np.int32(5))
    assert sampling == Sampling(stop=("a",), stop_ids=(3,), temperature=0.5, top_k=5)
    assert type(sampling.stop_ids[0]) is int
    assert type(sampling.temperature) is float


@pytest.mark.parametrize(
    "fields", [{"top_k": "5"}, {"top_k": True}, {"top_k": 1.5}, {"top_p": "1"}, {"ignore_eos": 1}, {"later": 1}]
)
def test_python_code_is_not_coerced_either(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sampling(**fields)


def test_values_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Sampling().top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2],
        np.array([1, 2]),
        np.array([[1, 2]], np.int32),
        np.array([1.0, 2.0], np.float32),
        np.array([1, 2], ">i4"),
        np.array([1, 2], object),
        b"\x01\x00\x00\x00",
        None,
    ],
    ids=["list", "int64", "2-D", "float32", "big-endian", "object", "bytes", "None"],
)
def test_an_array_field_takes_its_own_layout_only(prompt: Any) -> None:
    with pytest.raises(ValidationError, match=r"must be"):
        Group(id="g", prompt=prompt, trajectory_ids=("t",))


def test_equality_compares_arrays_by_content() -> None:
    assert samples.record() == samples.record()
    assert samples.record() != samples.failed_record()
    assert group(prompt_source=None) == group()
    one, other = (Score(id="1", sequences=(ids(1, 2), last)) for last in (ids(3), ids(4)))
    assert one != other
    assert Score(id="1", sequences=(ids(1),)) != Hello(id="1", client="c")
    nan = Sampling.model_construct(bias_values=floats(float("nan")))
    assert nan == Sampling.model_construct(bias_values=floats(float("nan")))
    assert nan != Sampling.model_construct(bias_values=floats(0))
    assert Sampling(bias_ids=ids(1), bias_values=floats(0)) != Sampling()


def test_metadata_comes_back_as_it_was_sent() -> None:
    sent = {
        "int": -(2**63),
        "large": 2**64 - 1,
        "float": 0.1,
        "nan": float("nan"),
        "text": "schön \U0001f600",
        "bytes": b"\xff",
        "none": None,
        "flag": False,
        "list": [1, [2, {"a": []}]],
        "": {},
    }
    received = decode_request(encode(samples.submit().model_copy(update={"groups": (group(metadata=sent),)})), Limits())
    metadata = received.groups[0].metadata
    assert metadata.pop("nan") != sent.pop("nan")
    assert metadata == sent
    assert [type(value) for value in metadata.values()] == [type(value) for value in sent.values()]


def test_metadata_turns_tuples_into_lists_and_numpy_into_numbers() -> None:
    metadata = group(metadata={"a": (1, np.int64(2)), "b": np.float32(0.5), "c": np.bool_(True)}).metadata
    assert metadata == {"a": [1, 2], "b": 0.5, "c": True}
    assert type(metadata["a"]) is list
    assert type(metadata["c"]) is bool


def test_metadata_is_a_copy() -> None:
    given: dict[str, Any] = {"a": [1]}
    held = group(metadata=given)
    given["a"].append(2)
    given["b"] = 3
    assert held.metadata == {"a": [1]}


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({17: -0.5}, "key 17 must be a string, not int"),
        ({"a": {17: 1}}, "key 17 must be a string"),
        ({"a": np.zeros(3)}, "must not hold an array"),
        ({"a": {1, 2}}, "must not hold a set"),
        ({"a": 1j}, "must not hold a complex"),
        ({"a": 2**64}, "must lie between"),
        ({"a": -(2**63) - 1}, "must lie between"),
        ({"a": "\ud800"}, "UTF-8"),
        ({"\ud800": 1}, "UTF-8"),
        ([1], "must be a map"),
    ],
)
def test_metadata_refuses_what_cannot_come_back(metadata: Any, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        group(metadata=metadata)


def test_metadata_that_holds_itself_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    with pytest.raises(ValidationError, match="nested deeper"):
        group(metadata=circle)


def test_text_of_failures_can_always_be_sent() -> None:
    record = samples.failed_record()
    assert record.error is not None
    for message, held in (("\udc80 lost", "? lost"), ("x" * 10_000, "x" * 4093 + "...")):
        failure = type(record.error)(code="internal", message=message, field=message)
        assert failure.message == held
        encode(Record(**{**record.__dict__, "error": failure}))


def test_an_array_differs_from_nothing() -> None:
    assert group(prompt_source=np.array([0, 1], np.uint8)) != group()
    assert group() != group(prompt_source=np.array([0, 1], np.uint8))


def test_a_value_is_told_by_what_is_not_at_its_default_and_in_short() -> None:
    assert str(Sampling(temperature=0.5, allowed_ids=ids(*range(1000)), stop_ids=[*range(90, 99)])) == (
        "Sampling(temperature=0.5, allowed_ids=int32[1000], stop_ids=(90, 91, 92, ...))"
    )
    assert repr(Sampling()) == "Sampling()"
    assert len(repr(Sampling(stop=("x" * 1000,)))) < 300


def test_a_group_is_told_by_its_size() -> None:
    assert str((group(),)) == "(Group('g', 1 trajectories, 2 prompt tokens, 'scripted'),)"


def test_a_status_is_one_line() -> None:
    (status,) = [reply for reply in samples.REPLIES.values() if reply.type == "worker_status"]
    assert str(status) == (
        "WorkerStatus(ready, weights 4, 2 running, 1 waiting, 0 to acknowledge, 1 session(s), up 12 s)"
    )
