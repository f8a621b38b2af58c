"""The strict base model and its arrays, as Python code meets them."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from pydantic import ValidationError

from protocols import BadRequest, Group, Hello, Limits, Record, Sampling, Score, bad_request, decode_request, encode
from protocols.base import suggestion
from tests.protocols import samples
from tests.protocols.samples import floats, ids


def group(**fields: Any) -> Group:
    return Group(id="g", prompt=ids(1, 2), trajectory_ids=("t",), **fields)


def test_python_code_may_use_lists_and_numbers_of_numpy() -> None:
    sampling = Sampling(stop=["a"], stop_ids=[np.int64(3)], temperature=np.float32(0.5), top_k=np.int32(5))
    assert sampling == Sampling(stop=("a",), stop_ids=(3,), temperature=0.5, top_k=5)
    assert type(sampling.stop_ids[0]) is int
    assert type(sampling.temperature) is float


class Tensor:
    """What plain numbers look like in torch, which the wire does not import."""

    def __init__(self, value: Any, *shape: int) -> None:
        self.value, self.shape = value, shape

    def item(self) -> Any:
        return self.value


def test_an_array_without_dimensions_is_the_number_that_it_holds() -> None:
    sampling = Sampling(stop_ids=[np.array(3), Tensor(4)], temperature=np.array(0.5), top_k=Tensor(5))
    assert sampling == Sampling(stop_ids=(3, 4), temperature=0.5, top_k=5)
    metadata = group(metadata={"a": np.array(1), "b": [{"c": {"d": {"e": Tensor(2.5)}}}]}).metadata
    assert metadata == {"a": 1, "b": [{"c": {"d": {"e": 2.5}}}]}
    for wrong in ({"top_k": np.array([5])}, {"top_k": Tensor(5, 1)}, {"top_k": Tensor(True)}, {"top_p": np.array("1")}):
        with pytest.raises(ValidationError):
            Sampling(**wrong)


@pytest.mark.parametrize(("name", "said"), [("tpo_p", "unknown field; did you mean top_p?"), ("zzz", "unknown field")])
def test_an_unknown_field_is_refused_by_name_on_both_sides_with_what_it_may_have_meant(name: str, said: str) -> None:
    with pytest.raises(ValidationError) as local:
        Sampling(**{name: 1})
    header, *blobs = encode(Score(id="1", sequences=(ids(1),)))
    misspelt = msgpack.unpackb(header) | {"sampling": {name: 1}}
    with pytest.raises(BadRequest) as received:
        decode_request([msgpack.packb(misspelt), *blobs], Limits())
    assert (bad_request(local.value).message, bad_request(local.value).field) == (said, name)
    assert (received.value.message, received.value.field) == (said, f"sampling.{name}")


@pytest.mark.parametrize(
    ("name", "known", "text"), [("bnid", ["bind", "device"], "; did you mean bind?"), ("zzz", ["bind"], "")]
)
def test_suggestions(name: str, known: list[str], text: str) -> None:
    assert suggestion(name, known) == text


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
