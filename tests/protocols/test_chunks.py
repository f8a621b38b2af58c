"""Large messages in parts: bounded packets, one copy, and a name for everything that can go wrong."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import (
    Assembler,
    BadRequest,
    Chunk,
    ChunkError,
    Limits,
    Packet,
    Pong,
    Reply,
    Scored,
    TurnDone,
    decode_reply,
    encode,
    split,
)
from protocols.chunks import MAX_OPEN, MAX_PIECES
from protocols.replies import ReplyMessage
from tests.protocols import samples
from tests.protocols.samples import marks

LIMITS = Limits()
HEADER = 200
"""More than a chunk's header takes besides its descriptors."""


def large(name: str = "7", lengths: tuple[int, ...] = (3000, 1, 0, 777)) -> Scored:
    arrays = tuple(np.arange(length, dtype=np.float32) for length in lengths)
    return Scored(id=name, weight_version=1, logprobs={"processed": arrays})


def packets(message: ReplyMessage, chunk_bytes: int = 1000, number: int = 0) -> list[Packet]:
    return list(split(encode(message), chunk_bytes, number=number, message_id=message.id))


def received(packet: Packet) -> list[bytes]:
    """A packet as the other end sees it."""
    return [bytes(frame) for frame in packet.frames]


def assemble(sent: list[Packet], assembler: Assembler | None = None) -> list[Reply]:
    assembler = assembler or Assembler(LIMITS)
    whole = [assembler.feed(received(packet)) for packet in sent]
    return [message for message in whole if message is not None]


@contextmanager
def traced() -> Iterator[None]:
    """Counts what is allocated inside; the models that are built at first use are built before."""
    assemble(packets(large()))
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def peak() -> int:
    return tracemalloc.get_traced_memory()[1]


def test_a_small_message_is_one_packet_untouched() -> None:
    frames = encode(samples.REPLIES["trajectory_done"])
    (packet,) = split(frames, 2**20, number=1, message_id="7")
    assert all(sent is frame for sent, frame in zip(packet.frames, frames, strict=True))
    assert packet.nbytes == sum(len(frame) for frame in frames)


def test_a_message_of_exactly_one_chunk_is_not_split() -> None:
    frames = encode(large())
    total = sum(len(frame) for frame in frames)
    assert len(list(split(frames, total, number=0, message_id="7"))) == 1
    assert len(list(split(frames, total - 1, number=0, message_id="7"))) == 2


@pytest.mark.parametrize("chunk_bytes", [64, 100, 1000, 4096, 12_001])
def test_packets_are_bounded_and_make_the_message_again(chunk_bytes: int) -> None:
    message = large()
    sent = packets(message, chunk_bytes)
    assert len(sent) > 1
    for packet in sent:
        assert packet.nbytes == sum(len(frame) for frame in packet.frames)
        assert packet.nbytes <= chunk_bytes + HEADER
        assert all(len(frame) <= max(chunk_bytes, HEADER) for frame in packet.frames)
    assert assemble(sent) == [message]


@given(
    lengths=st.lists(st.integers(0, 60), max_size=12),
    chunk_bytes=st.integers(64, 300),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_lengths_and_any_chunk_size(lengths: list[int], chunk_bytes: int) -> None:
    message = large(lengths=tuple(lengths))
    assert assemble(packets(message, chunk_bytes)) == [message]


def test_very_many_small_arrays_share_chunks_of_a_bounded_header() -> None:
    message = large(lengths=(1,) * 5000)
    sent = packets(message, 10_000)
    assert len(sent) < 30
    assert max(len(packet.frames) for packet in sent) <= MAX_PIECES + 2
    assert assemble(sent) == [message]


def test_packets_are_made_when_they_are_asked_for_and_share_the_arrays_memory() -> None:
    message = large(lengths=(1_000_000,))
    with traced():
        for packet in split(encode(message), 100_000, number=0, message_id="7"):
            longest = max(packet.frames, key=len)
            assert np.shares_memory(np.frombuffer(longest, np.uint8), message.logprobs["processed"][0])
        assert peak() < 100_000


def test_messages_in_parts_alternate_with_each_other_and_with_short_replies() -> None:
    rng = random.Random(0)
    messages = [large(str(n), (1000 * n, n)) for n in range(1, 6)]
    waiting = {n: packets(message, 500, number=n) for n, message in enumerate(messages)}
    pong = Pong(id="p", boot_id="b", weight_version=1)
    assembler = Assembler(LIMITS)
    whole: list[Reply | None] = []
    while waiting:
        number = rng.choice(list(waiting))
        whole.append(assembler.feed(received(waiting[number].pop(0))))
        if not waiting[number]:
            del waiting[number]
        assert assembler.feed(received(packets(pong)[0])) == pong
    done = [message for message in whole if message is not None]
    assert sorted(done, key=lambda message: message.id) == messages
    assert not assembler._open


def test_received_bytes_count_events_and_chunks_but_no_replies() -> None:
    assembler = Assembler(LIMITS)
    assemble(packets(samples.REPLIES["pong"]), assembler)
    assemble(packets(samples.REPLIES["error"]), assembler)
    assert assembler.received_bytes == 0
    event = packets(samples.REPLIES["batch_done"])
    in_parts = packets(large())
    assemble(event + in_parts, assembler)
    assert assembler.received_bytes == sum(packet.nbytes for packet in event + in_parts)


def test_assembled_arrays_are_aligned_read_only_and_of_one_buffer() -> None:
    (message,) = assemble(packets(large(lengths=(500, 3, 500))))
    assert isinstance(message, Scored)
    arrays = message.logprobs["processed"]
    assert all(array.flags.aligned and not array.flags.writeable for array in arrays)
    buffers = set()
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray) and base.base is not None:
            base = base.base
        buffers.add(id(base.obj if isinstance(base, memoryview) else base))
    assert len(buffers) == 1


def test_assembly_copies_each_byte_once() -> None:
    message = large(lengths=(1_000_000,))
    frames = [received(packet) for packet in packets(message, 100_000)]
    assembler = Assembler(LIMITS)
    with traced():
        for parts in frames:
            assembler.feed(parts)
        assert 4_000_000 < peak() < 4_200_000


def parts_of(message: ReplyMessage) -> list[Chunk]:
    chunks = [decode_reply(received(packet), LIMITS) for packet in packets(message)]
    return [chunk for chunk in chunks if isinstance(chunk, Chunk)]


def feed(assembler: Assembler, chunk: Chunk, **changed: Any) -> Reply | None:
    return assembler.feed([bytes(frame) for frame in encode(chunk.model_copy(update=changed))])


def test_a_missing_chunk_is_named_and_the_rest_dropped() -> None:
    first, _, third, *rest = parts_of(large())
    assembler = Assembler(LIMITS)
    feed(assembler, first)
    with pytest.raises(ChunkError, match=r"bytes 1000 to 2000 are missing \[offset\]") as caught:
        feed(assembler, third)
    assert caught.value.request_id == "7"
    assert not assembler._open
    with pytest.raises(ChunkError, match="no message 0 has begun"):
        feed(assembler, rest[0])


def test_a_repeated_chunk_is_named() -> None:
    first, second, *_ = parts_of(large())
    assembler = Assembler(LIMITS)
    feed(assembler, first)
    feed(assembler, second)
    with pytest.raises(ChunkError, match=r"bytes from 1000 come again"):
        feed(assembler, second)


def test_overlapping_chunks_are_named() -> None:
    first, second, *_ = parts_of(large())
    assembler = Assembler(LIMITS)
    feed(assembler, first)
    with pytest.raises(ChunkError, match="come again"):
        feed(assembler, second, offset=999)


def test_chunks_of_an_unknown_message_are_named() -> None:
    first, second, *_ = parts_of(large())
    assembler = Assembler(LIMITS)
    with pytest.raises(ChunkError, match=r"no message 0 has begun \[of\]"):
        feed(assembler, second)
    feed(assembler, first)
    with pytest.raises(ChunkError, match="no message 9 has begun"):
        feed(assembler, second, of=9)
    feed(assembler, second)


def test_a_message_that_begins_twice_is_named() -> None:
    first, *_ = parts_of(large())
    assembler = Assembler(LIMITS)
    feed(assembler, first)
    with pytest.raises(ChunkError, match="begins again"):
        feed(assembler, first)


def test_a_piece_over_the_end_of_a_frame_is_named() -> None:
    first, *_ = parts_of(large())
    assembler = Assembler(LIMITS)
    with pytest.raises(ChunkError, match=r"where 1 to 2 fit \[data\[0\]\]"):
        feed(assembler, first, sizes=np.array([2, 12_000]))
    with pytest.raises(ChunkError, match="0 bytes where"):
        feed(assembler, first, data=(marks(),))
    with pytest.raises(ChunkError, match="where 1 to 0 fit"):
        feed(assembler, first, data=(marks(1), marks(2)), sizes=np.array([1]))


@pytest.mark.parametrize(
    ("sizes", "limits", "complaint"),
    [
        ([], {}, "a message has a header"),
        ([0, 5], {}, "a message has a header"),
        ([9000, -1], {}, "a message has a header"),
        ([9000, 2**62], {}, "max_frame"),
        ([9000, 2**62, 2**62], {}, "max_frame"),
        ([9000, 1, 1, 1, 1, 1], {"max_blobs": 4}, "max_blobs, 4"),
        ([9000], {"max_header": 8999}, "max_header, 8999"),
        ([9000, 9000], {"max_message": 17_999}, "max_message, 17999"),
    ],
)
def test_announced_sizes_are_checked_before_memory_is_taken(
    sizes: list[int], limits: dict[str, int], complaint: str
) -> None:
    first, *_ = parts_of(large())
    assembler = Assembler(Limits(**limits))
    with traced():
        with pytest.raises(ChunkError, match=complaint):
            feed(assembler, first, sizes=np.array(sizes, np.int64))
        assert peak() < 100_000
    assert not assembler._open


def test_messages_in_parts_share_the_limit_of_one() -> None:
    first, *_ = parts_of(large())
    assembler = Assembler(Limits(max_message=25_000))
    feed(assembler, first, sizes=np.array([9000, 9000]))
    with pytest.raises(ChunkError, match="max_message, 25000"):
        feed(assembler, first, of=1, sizes=np.array([9000, 9000]))
    assert len(assembler._open) == 1


def test_not_too_many_messages_are_in_parts_at_once() -> None:
    first, *_ = parts_of(large())
    assembler = Assembler(LIMITS)
    for number in range(MAX_OPEN):
        feed(assembler, first, of=number)
    with pytest.raises(ChunkError, match=f"{MAX_OPEN} messages"):
        feed(assembler, first, of=MAX_OPEN)


def test_what_is_put_together_is_checked_like_any_message() -> None:
    frames = [b"\xc1", bytes(2000)]
    assembler = Assembler(LIMITS)
    *sent, last = split(frames, 1000, number=0, message_id="7")
    assemble(sent, assembler)
    with pytest.raises(BadRequest, match="not valid msgpack") as caught:
        assembler.feed(received(last))
    assert caught.value.request_id == "7"
    assert not assembler._open


def test_the_message_is_the_one_that_its_chunks_announce() -> None:
    sent = list(split(encode(large("7")), 1000, number=0, message_id="8"))
    with pytest.raises(ChunkError, match="not the one"):
        assemble(sent)
    inner = packets(large(), 3000)[0].frames
    nested = list(split(inner, 1000, number=1, message_id="7"))
    with pytest.raises(ChunkError, match="not the one"):
        assemble(nested)


def test_a_number_is_free_again_after_its_message() -> None:
    assembler = Assembler(LIMITS)
    for name in ("1", "2"):
        assert assemble(packets(large(name)), assembler) == [large(name)]


def test_an_event_in_parts_stays_an_event() -> None:
    count = 5000
    turn = samples.REPLIES["turn_done"]
    assert isinstance(turn, TurnDone)
    event = TurnDone(
        **{
            **turn.__dict__,
            "turn": turn.turn.model_copy(update={"length": count}),
            "token_ids": np.arange(count, dtype=np.int32),
            "logprobs": np.zeros(count, np.float32),
        }
    )
    assert assemble(packets(event)) == [event]
