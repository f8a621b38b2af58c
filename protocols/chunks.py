"""Large messages in pieces, so that a short reply never waits behind a long one.

`split` turns the frames of one message into packets of bounded size, each a multipart message of its own; a small
message is one packet, untouched. Packets of one connection arrive in the order sent, those of several messages may
alternate. `Assembler` puts them together again at the other end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from protocols.codec import Frame, decode_reply, encode
from protocols.errors import BadRequest
from protocols.limits import Limits
from protocols.replies import Chunk, Reply, is_event

MAX_PIECES = 1024
"""Pieces in one chunk: bounds a chunk's header when a message consists of very many small arrays."""

MAX_OPEN = 64
"""Messages of which a sender may have sent a part, per connection."""

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Packet:
    """What is sent in one go; `nbytes` of all its frames is what the send window counts."""

    frames: list[bytes | memoryview]
    nbytes: int


class ChunkError(BadRequest):
    """A chunk that does not continue what was received: bytes lost, repeated, or of an unknown message."""


def split(frames: Sequence[bytes | memoryview], chunk_bytes: int, *, number: int, message_id: str) -> Iterator[Packet]:
    """The packets of one encoded message, lazily, each at most `chunk_bytes` and a short header.

    number: differs between all messages of a connection that are in parts at one time. message_id: the message's
    own. Nothing is copied: packets are views of `frames`.
    """
    total = sum(map(len, frames))
    if total <= chunk_bytes:
        yield Packet(list(frames), total)
        return
    views = [memoryview(frame).cast("B") for frame in frames if len(frame)]
    sizes: np.ndarray | None = np.array([len(frame) for frame in frames], "<i8")
    offset = 0
    for pieces in _cut(views, chunk_bytes):
        data = tuple(np.frombuffer(piece, np.uint8) for piece in pieces)
        packet = encode(Chunk(id=message_id, of=number, offset=offset, data=data, sizes=sizes))
        yield Packet(packet, sum(len(frame) for frame in packet))
        offset += sum(len(piece) for piece in pieces)
        sizes = None


def _cut(views: list[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """Consecutive pieces of the views, as many to a chunk as fit, none across the end of a view."""
    pieces: list[memoryview] = []
    room = chunk_bytes
    for view in views:
        start = 0
        while start < len(view):
            piece = view[start : start + room]
            pieces.append(piece)
            start += len(piece)
            room -= len(piece)
            if room == 0 or len(pieces) == MAX_PIECES:
                yield pieces
                pieces, room = [], chunk_bytes
    if pieces:
        yield pieces


class Assembler:
    """Everything that one connection receives, whole again.

    received_bytes: bytes of all frames of events and chunks so far, which is what `ack.received_bytes` reports.
    Messages in parts take at most `limits.max_message` bytes together.
    """

    def __init__(self, limits: Limits) -> None:
        self.received_bytes = 0
        self._limits = limits
        self._open: dict[int, _Partial] = {}

    def feed(self, frames: Sequence[Frame]) -> Reply | None:
        """The message that these frames are or complete; None while parts are missing.

        Raises ChunkError for a chunk that fits nowhere, after which what its message had is dropped, and
        BadRequest for a message that is not valid.
        """
        message = decode_reply(frames, self._limits)
        if is_event(message):
            self.received_bytes += sum(memoryview(frame).nbytes for frame in frames)
        if not isinstance(message, Chunk):
            return message
        try:
            return self._take(message)
        except BadRequest as error:
            self._open.pop(message.of, None)
            error.request_id = message.id
            raise

    def _take(self, chunk: Chunk) -> Reply | None:
        partial = self._open.get(chunk.of)
        if partial is None:
            partial = self._open[chunk.of] = self._begin(chunk)
        elif chunk.sizes is not None:
            raise ChunkError(f"message {chunk.of} begins again before its end", field="sizes")
        partial.add(chunk)
        if partial.received < partial.total:
            return None
        del self._open[chunk.of]
        message = decode_reply(partial.frames(), self._limits)
        if isinstance(message, Chunk) or message.id != chunk.id:
            raise ChunkError(f"message {chunk.of} is not the one that its chunks announce", field="of")
        return message

    def _begin(self, chunk: Chunk) -> _Partial:
        if chunk.sizes is None or chunk.offset != 0:
            raise ChunkError(f"no message {chunk.of} has begun", field="of")
        if len(self._open) >= MAX_OPEN:
            raise ChunkError(f"{MAX_OPEN} messages are in parts already", field="of")
        sizes = [int(size) for size in chunk.sizes]
        limits = self._limits
        if not sizes or min(sizes) < 0 or sizes[0] == 0:
            raise ChunkError("a message has a header, and frames have sizes", field="sizes")
        if len(sizes) - 1 > limits.max_blobs:
            raise ChunkError(f"{len(sizes) - 1} blobs are more than max_blobs, {limits.max_blobs}", field="sizes")
        if sizes[0] > limits.max_header:
            raise ChunkError(f"the header is larger than max_header, {limits.max_header} bytes", field="sizes")
        if max(sizes) > limits.max_frame:
            raise ChunkError(f"a frame is larger than max_frame, {limits.max_frame} bytes", field="sizes")
        if sum(sizes) + sum(partial.total for partial in self._open.values()) > limits.max_message:
            raise ChunkError(f"messages in parts exceed max_message, {limits.max_message} bytes", field="sizes")
        return _Partial(sizes)


class _Partial:
    """One message being put together in a buffer of its own, in which every frame starts aligned."""

    def __init__(self, sizes: list[int]) -> None:
        self.total = sum(sizes)
        self.received = 0
        self._sizes = sizes
        self._starts: list[int] = []
        end = 0
        for size in sizes:
            self._starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._buffer = np.empty(end, np.uint8)
        self._frame = 0
        self._filled = 0

    def add(self, chunk: Chunk) -> None:
        if chunk.offset > self.received:
            raise ChunkError(f"bytes {self.received} to {chunk.offset} are missing", field="offset")
        if chunk.offset < self.received:
            raise ChunkError(f"bytes from {chunk.offset} come again", field="offset")
        for index, piece in enumerate(chunk.data):
            while self._frame < len(self._sizes) and self._filled == self._sizes[self._frame]:
                self._frame, self._filled = self._frame + 1, 0
            room = self._sizes[self._frame] - self._filled if self._frame < len(self._sizes) else 0
            if not 0 < len(piece) <= room:
                raise ChunkError(f"{len(piece)} bytes where 1 to {room} fit", field=f"data[{index}]")
            start = self._starts[self._frame] + self._filled
            self._buffer[start : start + len(piece)] = piece
            self._filled += len(piece)
            self.received += len(piece)

    def frames(self) -> list[memoryview]:
        view = memoryview(self._buffer.data).toreadonly()
        return [view[start : start + size] for start, size in zip(self._starts, self._sizes, strict=True)]
