"""Maps that are carried and not interpreted: what they may hold, and that they come back as they were sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protocols import Group, decode_request, encode
from protocols.limits import Limits
from tests.protocols import samples
from tests.protocols.samples import ids


def group(**fields: Any) -> Group:
    return Group(id="g", prompt=ids(1, 2), trajectory_ids=("t",), **fields)


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
        ({"a": np.zeros(3)}, "must be plain data, not an array"),
        ({"a": {1, 2}}, "must be plain data, not set"),
        ({"a": 1j}, "must be plain data, not complex"),
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
