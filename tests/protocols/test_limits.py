"""Each limit is refused by its name, and before the work that it is there to prevent."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from protocols import BadRequest, Group, Hello, Limits, Score, SubmitBatch, decode_request, encode
from tests.protocols.samples import ids

HELLO = {"type": "hello", "id": "1", "client": "c"}


def refused(message: Any, **limits: int) -> BadRequest:
    frames = encode(message) if not isinstance(message, dict) else [msgpack.packb(message)]
    decode_request(frames, Limits())
    with pytest.raises(BadRequest) as caught:
        decode_request(frames, Limits(**limits))
    (name,) = limits
    assert name in caught.value.message
    assert str(limits[name]) in caught.value.message
    return caught.value


def groups(count: int, trajectories: int, **fields: Any) -> SubmitBatch:
    return SubmitBatch(
        id="1",
        batch_id="b",
        groups=[
            Group(id=f"g{g}", prompt=ids(1), trajectory_ids=[f"{g}-{t}" for t in range(trajectories)], **fields)
            for g in range(count)
        ],
    )


def test_max_frame() -> None:
    assert refused(Score(id="1", sequences=[ids(*range(1000))]), max_frame=3999).request_id == "1"


def test_max_message() -> None:
    message = Score(id="1", sequences=[ids(*range(100))] * 4)
    size = sum(len(frame) for frame in encode(message))
    assert refused(message, max_message=size - 1).request_id == "1"
    decode_request(encode(message), Limits(max_message=size))


def test_max_header() -> None:
    # Not even the id is looked for in a header too large to read.
    assert refused(Hello(id="1", client="c" * 200), max_header=199).request_id == ""


def test_max_blobs() -> None:
    assert refused(Score(id="1", sequences=[ids(1)] * 5), max_blobs=4).request_id == "1"


def test_max_groups() -> None:
    assert refused(groups(5, 1), max_groups=4).field == "groups"


def test_max_trajectories_of_one_group_and_of_all() -> None:
    assert refused(groups(1, 5), max_trajectories=4).field == "groups[0].trajectory_ids"
    assert refused(groups(3, 2), max_trajectories=5).request_id == "1"
    decode_request(encode(groups(3, 2)), Limits(max_trajectories=6))


@pytest.mark.parametrize("field", ["trajectory_ids", "group_ids", "batch_ids"])
def test_max_trajectories_of_id_lists(field: str) -> None:
    assert refused({"type": "cancel", "id": "1", field: ["a"] * 5}, max_trajectories=4).field == field


def test_max_metadata_counts_packed_bytes() -> None:
    metadata = {"text": "ä" * 40, "list": list(range(20))}
    size = len(msgpack.packb(metadata))
    assert refused(groups(1, 1, metadata=metadata), max_metadata=size - 1).field == "groups[0].metadata"
    decode_request(encode(groups(1, 1, metadata=metadata)), Limits(max_metadata=size))


def test_max_metadata_holds_for_config() -> None:
    environment = {"name": "x", "config": {"text": "a" * 100}}
    assert refused(groups(1, 1, environment=environment), max_metadata=100).field == "groups[0].environment.config"


def test_max_nesting() -> None:
    metadata: dict[str, Any] = {"a": [{"b": [1]}]}
    assert refused(groups(1, 1, metadata=metadata), max_nesting=3).field == "groups[0].metadata"
    decode_request(encode(groups(1, 1, metadata=metadata)), Limits(max_nesting=4))


def test_ids_are_short() -> None:
    for length, accepted in ((256, True), (257, False)):
        frames = [msgpack.packb({**HELLO, "client": "c" * length})]
        if accepted:
            decode_request(frames, Limits())
        else:
            with pytest.raises(BadRequest, match="at most 256"):
                decode_request(frames, Limits())


@pytest.mark.parametrize(
    "header",
    [
        {**HELLO, "client": ["x"] * 65_000},
        {**HELLO, "session": {f"{i}": i for i in range(60_000)}},
        {"type": "cancel", "id": "1", "trajectory_ids": [5] * 65_000},
        {"type": "score", "id": "1", "sequences": [[1]] * 60_000},
        {"type": "submit", "id": "1", "batch_id": "b", "groups": [{}] * 4096},
    ],
    ids=["list for a name", "map for a name", "ints for ids", "lists for arrays", "empty groups"],
)
def test_a_long_list_of_mistakes_costs_one_error(header: Any) -> None:
    frames = [msgpack.packb(header)]
    start = time.thread_time()
    with pytest.raises(BadRequest):
        decode_request(frames, Limits())
    assert time.thread_time() - start < 0.2


def test_a_large_opaque_map_is_left_as_soon_as_it_is_too_large() -> None:
    header = msgpack.unpackb(encode(groups(1, 1))[0])
    header["groups"][0]["metadata"] = {"a": [0] * 65_000, "b": [[0] * 65_000] * 5}
    frames = [msgpack.packb(header), *encode(groups(1, 1))[1:]]
    with pytest.raises(BadRequest, match=r"max_metadata, 1000 bytes \[groups\[0\]\.metadata\]"):
        decode_request(frames, Limits(max_metadata=1000))


def test_limits_themselves_are_checked() -> None:
    with pytest.raises(ValidationError):
        Limits(max_frame=-1)
    with pytest.raises(ValidationError):
        Limits(chunk_bytes=0)
