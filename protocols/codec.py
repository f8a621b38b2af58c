"""Messages to frames and back: `[header msgpack][blob 0][blob 1]...`.

The header is the message as a msgpack map. An array in it is an extension of type `ARRAY` whose payload is the
msgpack array `[blob index, dtype, shape]`; its bytes, little-endian and in C order, are a frame of their own. User
data cannot look like that: opaque maps hold no extensions. Nothing is copied on either side: a sent blob is a view
of the message's array, a received array is a read-only view of the frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast, get_args

import msgpack
import numpy as np
from pydantic import ValidationError

from protocols.base import Bad, BlobRef, Received, Value
from protocols.errors import BadRequest
from protocols.limits import Limits
from protocols.replies import Reply, ReplyMessage
from protocols.requests import Request, RequestMessage
from protocols.scalars import PROTOCOL

ARRAY = 1
"""The one msgpack extension type of the protocol."""

_BROKEN = (ValueError, TypeError, OverflowError, msgpack.UnpackException, msgpack.exceptions.BufferFull)
"""What msgpack raises for bytes that are not its own."""

Frame = bytes | bytearray | memoryview
M = TypeVar("M", RequestMessage, ReplyMessage)


def _by_type(union: Any) -> dict[str, type[Any]]:
    members = get_args(get_args(union)[0])
    return {member.model_fields["type"].default: member for member in members}


REQUESTS: dict[str, type[RequestMessage]] = _by_type(Request)
REPLIES: dict[str, type[ReplyMessage]] = _by_type(Reply)


def encode(message: Value) -> list[bytes | memoryview]:
    """Frames of a message (or of a part of one). The views are of the message's arrays: do not write to those."""
    blobs: list[bytes | memoryview] = []

    def pack(value: Any) -> Any:
        if Value in type(value).__mro__:  # what isinstance would say, after several calls of pydantic's
            return value.__dict__
        if isinstance(value, np.ndarray):
            described = _described(len(blobs), value.dtype, value.shape)
            blobs.append(value.reshape(-1).view(np.uint8).data)
            return described
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be sent")

    header = msgpack.packb(message, default=pack, buf_size=4096)
    return [header, *blobs]


@lru_cache(maxsize=4096)
def _described(index: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> msgpack.ExtType:
    """Records of one batch have arrays of few lengths."""
    return msgpack.ExtType(ARRAY, msgpack.packb((index, dtype.str, shape), buf_size=256))


def fingerprint(value: Value) -> bytes:
    """SHA-256 of a value as encoded: equal for equal content, whichever process made it."""
    digest = hashlib.sha256()
    for frame in encode(value):
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()


def decode_request(frames: Sequence[Frame], limits: Limits) -> Request:
    """The request in the frames of one multipart message (without the routing id).

    Raises BadRequest, with the path of the offending field and, where it could be read, the message's own id as
    `request_id`.
    """
    return cast(Request, _decode(frames, limits, REQUESTS))


def decode_reply(frames: Sequence[Frame], limits: Limits) -> Reply:
    """The reply or event in the frames of one multipart message. Raises BadRequest as `decode_request` does."""
    return cast(Reply, _decode(frames, limits, REPLIES))


def _decode(frames: Sequence[Frame], limits: Limits, known: dict[str, type[M]]) -> M:
    if not frames:
        raise BadRequest("a message has at least one frame")
    header = _read_header(memoryview(frames[0]), limits)
    name = header.get("id")
    request_id = name if isinstance(name, str) and len(name) <= 256 else ""
    try:
        _check_sizes(frames, limits)
        model = _choose(header, known)
        received = Received([memoryview(frame).toreadonly() for frame in frames[1:]], limits)
        message = model.model_validate(header, context=received)
        unused = received.taken.find(0)
        if unused >= 0:
            raise BadRequest(f"blob {unused} of {len(received.blobs)} belongs to no field")
        return message
    except ValidationError as error:
        raise bad_request(error, request_id) from None
    except BadRequest as error:
        error.request_id = request_id
        raise


def _check_sizes(frames: Sequence[Frame], limits: Limits) -> None:
    if len(frames) - 1 > limits.max_blobs:
        raise BadRequest(f"{len(frames) - 1} blobs are more than max_blobs, {limits.max_blobs}")
    total = 0
    for index, frame in enumerate(frames):
        size = memoryview(frame).nbytes
        if size > limits.max_frame:
            raise BadRequest(f"frame {index} has {size} bytes, more than max_frame, {limits.max_frame}")
        total += size
    if total > limits.max_message:
        raise BadRequest(f"the message has {total} bytes, more than max_message, {limits.max_message}")


def _choose(header: dict[str, Any], known: dict[str, type[M]]) -> type[M]:
    protocol = header.get("protocol", PROTOCOL)
    if type(protocol) is not int or protocol != PROTOCOL:
        raise BadRequest(f"this end speaks protocol {PROTOCOL} only", field="protocol")
    name = header.get("type")
    if not isinstance(name, str):
        raise BadRequest("must name the kind of message", field="type")
    if name not in known:
        raise BadRequest(f"no message of type {name[:64]!r} is received here", field="type")
    return known[name]


def _read_header(frame: memoryview, limits: Limits) -> dict[str, Any]:
    if frame.nbytes > limits.max_header:
        raise BadRequest(f"the header has {frame.nbytes} bytes, more than max_header, {limits.max_header}")
    try:
        return _unpack_header(frame, limits)
    except BadRequest as error:
        error.request_id = _salvage_id(frame)
        raise
    except (*_BROKEN, RecursionError) as error:
        raise _not_msgpack(error, frame) from None


def _not_msgpack(error: BaseException, frame: memoryview) -> BadRequest:
    """Made here and raised elsewhere: with a name where it is raised, its traceback would keep it and the frame alive
    until the next garbage collection."""
    refusal = BadRequest(f"the header is not valid msgpack: {str(error)[:200] or type(error).__name__}")
    refusal.request_id = _salvage_id(frame)
    return refusal


def _unpack_header(frame: memoryview, limits: Limits) -> dict[str, Any]:
    # Passed over once without building anything: afterwards every length in it is known to be backed by bytes, so
    # that nested claims of huge arrays cannot make the second pass reserve memory for them.
    scan = msgpack.Unpacker(max_buffer_size=frame.nbytes)
    scan.feed(frame)
    scan.skip()
    if scan.tell() != frame.nbytes:
        raise BadRequest("bytes follow the header's map")
    entries = max(limits.max_trajectories, limits.max_groups, limits.max_blobs, limits.max_metadata)
    header = msgpack.unpackb(
        frame,
        raw=False,
        use_list=False,
        # Keys are checked in `_map`, which is stricter (no bytes either) and lets the error name the place.
        strict_map_key=False,
        object_pairs_hook=_map,
        ext_hook=_extension,
        max_array_len=entries,
        max_map_len=entries,
        max_ext_len=256,
    )
    if isinstance(header, Bad):
        raise BadRequest(f"the header: {header.why}")
    if not isinstance(header, dict):
        raise BadRequest("the header must be a map")
    return header


def _salvage_id(frame: memoryview) -> str:
    """The id of a message whose header breaks off or goes wrong only after it."""
    scan = msgpack.Unpacker(max_buffer_size=frame.nbytes, strict_map_key=False, max_array_len=64, max_map_len=64)
    try:
        scan.feed(frame)
        for _ in range(min(scan.read_map_header(), 64)):
            key = scan.unpack()
            if key != "id":
                scan.skip()
                continue
            value = scan.unpack()
            return value if isinstance(value, str) and len(value) <= 256 else ""
    except _BROKEN:
        pass
    return ""


def _map(pairs: list[tuple[Any, Any]]) -> dict[str, Any] | Bad:
    result = {key: value for key, value in pairs if type(key) is str}
    return result if len(result) == len(pairs) else _bad_map(pairs)


def _bad_map(pairs: list[tuple[Any, Any]]) -> Bad:
    seen: set[str] = set()
    for key, _ in pairs:
        if type(key) is not str:
            return Bad(f"key {str(key)[:32]} must be a string, not {type(key).__name__}")
        if key in seen:
            break
        seen.add(key)
    return Bad(f"key {key[:64]!r} appears twice")


def _extension(code: int, payload: bytes) -> BlobRef | Bad:
    return _array(payload) if code == ARRAY else Bad(f"msgpack extension type {code} is unknown")


@lru_cache(maxsize=4096)
def _array(payload: bytes) -> BlobRef | Bad:
    """What `_described` made, likewise of few kinds."""
    described = msgpack.unpackb(payload, raw=False, use_list=False)
    match described:
        case (int(index), str(dtype), tuple(shape)) if type(index) is int and all(type(n) is int for n in shape):
            return BlobRef(index, dtype, shape)
    return Bad("an array is described by [blob index, dtype, shape]")


def _given(value: Any) -> str:
    """Where it is short."""
    if isinstance(value, str):
        return f", not {value[:40]!r}"
    short = isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**128)
    return f", not {value!r}" if short else ""


def bad_request(error: ValidationError, request_id: str = "") -> BadRequest:
    """The first error of a validation as what crosses the wire, its place as a path: `groups[3].sampling.top_p`."""
    first = error.errors(include_url=False)[0]
    below = first.get("ctx", {}).get("at", "")
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in first["loc"]) + below
    given = first["input"]
    if isinstance(given, Bad):
        message = given.why
    elif first["type"] == "missing":
        message = "is required"
    else:
        # As everything else here says it, and with what was given.
        message, _, should = first["msg"].partition(" should ")
        if should:
            message = f"must {should.replace(' after validation', '')}{_given(given)}"
    refusal = BadRequest(message, field=path.removeprefix(".") or None)
    refusal.request_id = request_id
    return refusal
