"""Requests that cost one `bad_request`, for the golden vectors and as a start for mutations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack


def refused() -> Iterator[tuple[str, str | None, str, list[bytes]]]:
    """What is wrong, the field and the id that the error names, the frames."""
    hello = {"protocol": 1, "id": "1", "type": "hello", "client": "c"}
    prompt = described(0, "<i4", [1])
    group = {"id": "g", "prompt": prompt, "trajectory_ids": ["t"]}
    submit = {"protocol": 1, "id": "2", "type": "submit", "batch_id": "b", "groups": [group]}
    token = bytes(4)

    def changed(**fields: Any) -> dict[str, Any]:
        return submit | {"groups": [group | fields]}

    def sampling(**fields: Any) -> list[Any]:
        return [changed(sampling=fields), token]

    def blob(*parts: Any) -> list[Any]:
        return [changed(prompt=described(*parts)), token]

    both = [changed(prompt_source=described(0, "|u1", [4])), token]
    bias = [changed(sampling={"bias_ids": described(1, "<i4", [1])}), token, token]
    cases: list[tuple[str, str | None, str, list[Any]]] = [
        ("no frame at all", None, "", []),
        ("header is not msgpack", None, "", [b"\xc1"]),
        ("header is cut off after the id", None, "1", [msgpack.packb(hello)[:-1]]),
        ("bytes follow the header", None, "1", [msgpack.packb(hello) + b"\x00"]),
        ("header is a list", None, "", [[1]]),
        ("a key appears twice", None, "1", [b"\x82\xa2id\xa11\xa2id\xa12"]),
        ("an int as key of the header", None, "1", [hello | {5: 6}]),
        ("an int as key of metadata", "groups[0].metadata.a", "2", [changed(metadata={"a": {5: 6}}), token]),
        ("an array in metadata", "groups[0].metadata.a[0]", "2", [changed(metadata={"a": [prompt]}), token]),
        ("another protocol", "protocol", "1", [hello | {"protocol": 2}]),
        ("a true for the protocol", "protocol", "1", [hello | {"protocol": True}]),
        ("unknown type", "type", "1", [hello | {"type": "hi"}]),
        ("a reply's type", "type", "1", [hello | {"type": "pong"}]),
        ("missing type", "type", "1", [{"id": "1"}]),
        ("empty id", "id", "", [hello | {"id": ""}]),
        ("id of 10 kB", "id", "", [hello | {"id": "x" * 10_000}]),
        ("id of bytes", "id", "", [hello | {"id": b"1"}]),
        ("id of an int", "id", "", [hello | {"id": 1}]),
        ("unknown field", "klient", "1", [hello | {"klient": 1}]),
        ("missing field", "client", "1", [{"id": "1", "type": "hello"}]),
        ("unknown extension type", "client", "1", [hello | {"client": msgpack.ExtType(9, b"")}]),
        ("a string for an int", "groups[0].sampling.top_k", "2", sampling(top_k="5")),
        ("a bool for an int", "groups[0].sampling.top_k", "2", sampling(top_k=True)),
        ("a float for an int", "groups[0].sampling.top_k", "2", sampling(top_k=1.0)),
        ("NaN", "groups[0].sampling.top_p", "2", sampling(top_p=float("nan"))),
        ("an empty stop string", "groups[0].sampling.stop[0]", "2", sampling(stop=[""])),
        ("a list for an array", "groups[0].prompt", "2", [changed(prompt=[1]), token]),
        ("another dtype", "groups[0].prompt", "2", blob(0, "<i8", [1])),
        ("an object dtype", "groups[0].prompt", "2", blob(0, "|O", [1])),
        ("two dimensions for one", "groups[0].prompt", "2", blob(0, "<i4", [1, 1])),
        ("a negative extent", "groups[0].prompt", "2", blob(0, "<i4", [-1])),
        ("an extent of 2**60", "groups[0].prompt", "2", blob(0, "<i4", [2**60])),
        ("a blob that is not there", "groups[0].prompt", "2", blob(1, "<i4", [1])),
        ("a negative blob index", "groups[0].prompt", "2", blob(-1, "<i4", [1])),
        ("one blob named twice", "groups[0].prompt_source", "2", both),
        ("a descriptor of another form", "groups[0].prompt", "2", blob(0, "<i4")),
        ("one trajectory twice", "groups[0].trajectory_ids", "2", [changed(trajectory_ids=["t", "t"]), token]),
        ("bias without values", "groups[0].sampling.bias_values", "2", bias),
        ("a blob of another size", "groups[0].prompt", "2", [submit, bytes(5)]),
        ("a blob that no field names", None, "2", [submit, token, b""]),
    ]
    for wrong, field, request_id, frames in cases:
        packed = [frame if isinstance(frame, bytes) else msgpack.packb(frame) for frame in frames]
        yield wrong, field, request_id, packed


def described(*parts: Any) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb(parts))
