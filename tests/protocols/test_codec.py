"""Frames: nothing is copied, nothing is coerced, and a refusal says where and to whom."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest

from protocols import (
    BadRequest,
    Continue,
    Hello,
    Limits,
    Ok,
    Score,
    Segment,
    SubmitBatch,
    TrajectoryDone,
    Turn,
    decode_reply,
    decode_request,
    encode,
    fingerprint,
)
from protocols.codec import ARRAY, REPLIES, REQUESTS
from tests.protocols import samples
from tests.protocols.samples import ids, marks

LIMITS = Limits()


def header_of(message: Any) -> dict[str, Any]:
    return msgpack.unpackb(encode(message)[0], strict_map_key=False)


def refusal(header: Any, *blobs: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode_request([header if isinstance(header, bytes) else msgpack.packb(header), *blobs], LIMITS)
    return caught.value


def test_a_sent_frame_is_the_array_itself() -> None:
    sequence = ids(*range(1000))
    frames = encode(Score(id="1", sequences=(sequence,)))
    assert len(frames) == 2
    assert isinstance(frames[1], memoryview)
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), sequence)


def test_a_received_array_is_the_frame_itself_and_read_only() -> None:
    sent = encode(samples.REPLIES["trajectory_done"])
    frames = [bytearray(frame) for frame in sent]
    received = decode_reply([memoryview(frame) for frame in frames], LIMITS)
    assert isinstance(received, TrajectoryDone)
    segment = received.record.segments[0]
    arrays = [array for array in segment.__dict__.values() if isinstance(array, np.ndarray)]
    arrays += segment.more_logprobs.values()
    assert len(arrays) == len(frames) - 1
    for array in arrays:
        assert any(np.shares_memory(array, np.frombuffer(frame, np.uint8)) for frame in frames[1:])
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_frames_of_a_matrix_are_flat_bytes_in_c_order() -> None:
    runs = np.array([[1, 2], [3, 4]], np.int64)
    sampled = np.asfortranarray(runs)
    segment = Segment(
        token_ids=ids(1, 2, 3, 4, 5, 6),
        source=marks(*[1] * 6),
        logprobs=np.zeros(6, np.float32),
        loss_mask=marks(*[1] * 6),
        weight_versions=sampled,
        kv_versions=runs,
        turns=(),
    )
    frames = encode(segment)
    assert bytes(frames[5]) == runs.tobytes()
    assert all(memoryview(frame).format == "B" for frame in frames)


def test_a_slice_with_gaps_is_sent_as_its_values() -> None:
    every_second = ids(*range(10))[::2]
    received = decode_request(encode(Score(id="1", sequences=(every_second,))), LIMITS)
    assert isinstance(received, Score)
    assert received.sequences[0].tolist() == [0, 2, 4, 6, 8]


def test_empty_arrays_and_none_keep_apart() -> None:
    message = Continue(id="1", trajectory_id="t", turn=0, expected_len=1, glue=ids(), observation=None)
    received = decode_request([bytes(frame) for frame in encode(message)], LIMITS)
    assert isinstance(received, Continue)
    assert received.glue is not None
    assert received.glue.shape == (0,)
    assert received.observation is None


def test_numpy_scalars_leave_as_plain_numbers() -> None:
    message = Ok(id="1", detail={"running": np.int64(3)})
    assert header_of(message)["detail"] == {"running": 3}
    turn = Turn(index=np.int64(0), start=np.int32(2), length=np.uint8(1), finish_reason="stop", reward=np.float32(0.5))
    assert header_of(turn)["length"] == 1
    assert type(turn.length) is int
    record = samples.record().model_copy(update={"reward": np.float32(0.25), "wall_s": np.float64(2)})
    assert header_of(record)["reward"] == 0.25
    batch = samples.submit()
    group = batch.groups[0].model_copy(update={"metadata": {"flag": np.bool_(True)}})
    assert header_of(group)["metadata"] == {"flag": True}


def test_what_cannot_be_sent_says_its_type() -> None:
    group = samples.submit().groups[0].model_copy(update={"metadata": {"a": object()}})
    with pytest.raises(TypeError, match="object cannot be sent"):
        encode(group)


def test_user_data_cannot_pose_as_an_array() -> None:
    posing = {"blob": 0, "dtype": "<i4", "shape": [3], "bytes": msgpack.packb([0, "<i4", [3]])}
    group = samples.submit().groups[1].model_copy(update={"metadata": posing})
    received = decode_request(encode(SubmitBatch(id="1", batch_id="b", groups=(group,))), LIMITS)
    assert isinstance(received, SubmitBatch)
    assert received.groups[0].metadata == posing


@pytest.mark.parametrize("kind", sorted(REQUESTS))
def test_every_field_of_every_request_is_strict(kind: str) -> None:
    """A value of a type that the field does not have is refused under the field's name."""
    frames = encode(samples.REQUESTS[kind])
    header = msgpack.unpackb(frames[0])
    for name in header:
        if name == "type":
            continue
        wrong = refusal({**header, name: {"unexpected": []}}, *frames[1:])
        assert wrong.field is not None
        assert wrong.field.startswith(name), (name, wrong)


@pytest.mark.parametrize("kind", sorted(REPLIES))
def test_every_reply_refuses_an_unknown_field(kind: str) -> None:
    frames = encode(samples.REPLIES[kind])
    header = msgpack.unpackb(frames[0]) | {"later": 1}
    with pytest.raises(BadRequest, match=r"unknown field.* \[later\]"):
        decode_reply([msgpack.packb(header), *frames[1:]], LIMITS)


@pytest.mark.parametrize(
    ("value", "accepted"),
    [(1, True), (0.5, True), ("1", False), (True, False), (None, False), (float("nan"), False), (float("inf"), False)],
)
def test_a_float_field_takes_numbers_only(value: Any, accepted: bool) -> None:
    header = {"type": "drain", "id": "1", "timeout_s": value}
    if accepted:
        assert decode_request([msgpack.packb(header)], LIMITS).timeout_s == value
    else:
        assert refusal(header).field == "timeout_s"


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"type": "hello", "id": "1"}, "is required [client]"),
        ({"type": "hello", "id": "1", "client": ""}, "must have at least 1 character, not '' [client]"),
        ({"type": "score", "id": "1", "sequences": []}, "must have at least 1 item, not 0 [sequences]"),
        ({"type": "drain", "id": "1", "timeout_s": 0}, "must be greater than 0, not 0 [timeout_s]"),
        ({"type": "sleep", "id": "1", "level": "2"}, "must be a valid integer, not '2' [level]"),
        ({"type": "commit_weights", "id": "1", "update_id": "u", "version": 1}, 'is required by mode "drain"'),
    ],
)
def test_refusals_are_said_in_one_way(header: dict[str, Any], said: str) -> None:
    assert str(refusal(header)).startswith(said)


def test_requests_and_replies_do_not_pass_for_each_other() -> None:
    with pytest.raises(BadRequest, match="no message of type 'pong'"):
        decode_request(encode(samples.REPLIES["pong"]), LIMITS)
    with pytest.raises(BadRequest, match="no message of type 'ping'"):
        decode_reply(encode(samples.REQUESTS["ping"]), LIMITS)


def test_a_missing_protocol_means_this_one() -> None:
    assert decode_request([msgpack.packb({"type": "ping", "id": "1"})], LIMITS).protocol == 1


def test_the_path_of_a_deep_field_is_spelled_out() -> None:
    frames = encode(samples.submit())
    header = msgpack.unpackb(frames[0])
    header["groups"][0]["environment"]["script"][1]["max_tokens"] = 0
    wrong = refusal(header, *frames[1:])
    assert wrong.field == "groups[0].environment.script[1].max_tokens"
    assert wrong.request_id == "7"
    assert wrong.failure().field == wrong.field


def test_a_hostile_key_is_cut_in_the_path() -> None:
    wrong = refusal({"type": "ping", "id": "1", "k" * 100_000: 1})
    assert wrong.field == "k" * 64
    wrong = refusal({"type": "ping", "id": "1", **{f"unknown {i}": 0 for i in range(10_000)}})
    assert wrong.field == "unknown 0"


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        msgpack.packb({"id": "9", "type": "ping"})[:-2],
        b"\x82\xa2id\xa19\xa4type\xdd\xff\xff\xff\xff",
        b"\x82\xa2id\xa19\xa4type\xdf\xff\xff\xff\xff",
        b"\x82\xa2id\xa19\xa4type\xdb\xff\xff\xff\xff",
        b"\x82\xa2id\xa19\xa4type\xc9\xff\xff\xff\xff\x01",
        b"\x82\xa2id\xa19\xa4type\xa1\xff",
        b"\x82\xa2id\xa19\xa4type" + b"\x91" * 2000,
        b"\x82\xa2id\xa19\xa4type" + b"\x81\xa1a" * 2000,
    ],
)
def test_broken_headers_are_answered_where_their_id_can_be_read(broken: bytes) -> None:
    wrong = refusal(broken)
    assert wrong.code == "bad_request"
    assert wrong.request_id == ("9" if broken else "")


def test_nested_claims_of_huge_lists_reserve_no_memory() -> None:
    claims = b"\x82\xa2id\xa19\xa4type" + b"\xdc\xff\xff" * 500 + bytes(70_000)
    tracemalloc.start()
    assert refusal(claims).request_id == "9"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20


def test_a_timestamp_is_no_value_of_ours() -> None:
    assert refusal({"type": "hello", "id": "1", "client": msgpack.Timestamp(1)}).field == "client"


def test_an_array_of_another_extension_type_is_refused() -> None:
    described = msgpack.packb([0, "<i4", [1]])
    header = {"type": "score", "id": "1", "sequences": [msgpack.ExtType(ARRAY + 1, described)]}
    wrong = refusal(header, bytes(4))
    assert wrong.field == "sequences[0]"
    assert "extension type 2" in wrong.message


def test_fingerprints_tell_content_apart_and_nothing_else() -> None:
    batch = samples.submit()
    received = decode_request([bytes(frame) for frame in encode(batch)], LIMITS)
    assert isinstance(received, SubmitBatch)
    same, other, _ = received.groups
    assert fingerprint(same) == fingerprint(batch.groups[0]) != fingerprint(other)
    assert fingerprint(same.model_copy(update={"prompt": ids(9906, 11, 1918)})) != fingerprint(same)
    assert fingerprint(same.model_copy(update={"priority": 0})) != fingerprint(same)
    assert Hello(id="1", client="c") == Hello(id="1", client="c")
