"""A bare DEALER socket and msgpack: what a client in another language would do, and what a hostile one can."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
import zmq

ARRAY = 1
EVENTS = {"turn_done", "trajectory_done", "group_done", "batch_done", "weights_progress", "chunk"}


class RawClient:
    """auto_count: report received bytes after each event, as a client that wants large results has to.

    curve: the worker's public key, our public and our secret one.
    """

    def __init__(
        self,
        address: str,
        *,
        identity: bytes | None = None,
        auto_count: bool = True,
        curve: tuple[bytes, bytes, bytes | None] | None = None,
    ) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        if curve is not None:
            self.socket.curve_serverkey, self.socket.curve_publickey, self.socket.curve_secretkey = curve
        self.socket.connect(address)
        self.auto_count = auto_count
        self.received_bytes = 0
        self.waiting: list[dict[str, Any]] = []
        self.pings = 0
        self._numbers = itertools.count()
        self._chunks: dict[int, tuple[list[int], bytearray]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close(linger=500)
        self.context.term()

    # Out.

    def send(self, kind: str, /, **fields: Any) -> str:
        """Send a request; arrays anywhere in the fields become blobs. Returns its id."""
        request_id = str(fields.pop("id", f"r{next(self._numbers)}"))
        self.socket.send_multipart(pack({"type": kind, "id": request_id, "protocol": 1, **fields}))
        return request_id

    def call(self, kind: str, /, timeout: float = 10.0, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its reply, whatever it is."""
        return self.reply(self.send(kind, **fields), timeout)

    def hello(self, session: str | None = None, timeout: float = 10.0) -> dict[str, Any]:
        # A `hello` starts a new connection, on which nothing has been received yet.
        self.received_bytes = 0
        return self.call("hello", timeout, client="raw", session=session)

    # In.

    def reply(self, request_id: str, timeout: float = 10.0) -> dict[str, Any]:
        return self.wait(lambda message: message["id"] == request_id and message["type"] not in EVENTS, timeout)

    def event(self, kind: str, timeout: float = 10.0) -> dict[str, Any]:
        return self.wait(lambda message: message["type"] == kind, timeout)

    def record(self, timeout: float = 10.0, *, ack: bool = True) -> dict[str, Any]:
        """The next result."""
        record: dict[str, Any] = self.event("trajectory_done", timeout)["record"]
        if ack:
            self.send("ack", trajectory_ids=[record["trajectory_id"]], received_bytes=self.received_bytes)
        return record

    def wait(self, wanted: Callable[[dict[str, Any]], bool], timeout: float) -> dict[str, Any]:
        """The first message that is wanted; the others are kept. Raises TimeoutError."""
        for message in self.waiting:
            if wanted(message):
                self.waiting.remove(message)
                return message
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if message is None:
                continue
            if wanted(message):
                return message
            self.waiting.append(message)
        raise TimeoutError(f"not among {[(m['type'], m['id']) for m in self.waiting]}")

    def nothing(self, seconds: float) -> bool:
        """Did nothing but pings arrive for so long?"""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if message is not None:
                self.waiting.append(message)
                return False
        return True

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message that is neither a ping of the worker's nor a part of one."""
        if not self.socket.poll(int(timeout * 1000)):
            return None
        frames = self.socket.recv_multipart()
        message = unpack(frames)
        if message["type"] in EVENTS:
            self.received_bytes += sum(map(len, frames))
            if self.auto_count:
                self.send("ack", received_bytes=self.received_bytes)
        if message["type"] == "chunk":
            return self._assemble(message)
        if message["type"] == "pong" and not message["id"]:
            self.pings += 1
            return None
        return message

    def _assemble(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        if chunk.get("sizes") is not None:
            self._chunks[chunk["of"]] = (chunk["sizes"].tolist(), bytearray())
        sizes, data = self._chunks[chunk["of"]]
        assert chunk["offset"] == len(data)
        for piece in chunk["data"]:
            data += piece.tobytes()
        if len(data) < sum(sizes):
            return None
        del self._chunks[chunk["of"]]
        ends = list(itertools.accumulate(sizes))
        return unpack([bytes(data[end - size : end]) for size, end in zip(sizes, ends, strict=True)])


def pack(message: dict[str, Any]) -> list[bytes]:
    blobs: list[bytes] = []

    def array(value: Any) -> msgpack.ExtType:
        assert isinstance(value, np.ndarray)
        blobs.append(value.tobytes())
        return msgpack.ExtType(ARRAY, msgpack.packb([len(blobs) - 1, value.dtype.str, list(value.shape)]))

    return [msgpack.packb(message, default=array), *blobs]


def unpack(frames: list[bytes]) -> dict[str, Any]:
    def array(code: int, payload: bytes) -> Any:
        assert code == ARRAY
        index, dtype, shape = msgpack.unpackb(payload)
        return np.frombuffer(frames[1 + index], dtype).reshape(shape)

    message: dict[str, Any] = msgpack.unpackb(frames[0], ext_hook=array)
    return message


def group(
    name: str = "g", *, n: int = 1, prompt: Any = (1, 2, 3), max_tokens: int | None = 4, **fields: Any
) -> dict[str, Any]:
    """A group as it is sent; `sampling` is merged with max_tokens."""
    sampling = {"ignore_eos": True} | fields.pop("sampling", {})
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    return {
        "id": name,
        "prompt": np.array(prompt, np.int32),
        "trajectory_ids": [f"{name}.{i}" for i in range(n)],
        "sampling": sampling,
        **fields,
    }
