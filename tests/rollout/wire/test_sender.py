from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from protocols.chunks import Assembler
from protocols.codec import encode
from protocols.fields import Limits
from protocols.replies import GroupDone, ReplyMessage, Scored, TurnDone
from rollout.wire.outbox import Event
from rollout.wire.sender import BURST, Sender
from tests.rollout.workers import on_loop

LIMITS = Limits()


class Wire:
    """What a sender sent, and a receiver that counts as clients do."""

    def __init__(self, window: int, chunk: int = 1000) -> None:
        self.up = True
        self.frames: list[list[bytes | memoryview]] = []
        self.messages: list[ReplyMessage] = []
        self.assembler = Assembler(LIMITS)
        self.received: list[Event] = []
        self.sender = Sender(self.send, window_bytes=window, chunk_bytes=chunk, on_received=self.received.append)

    def send(self, frames: list[bytes | memoryview]) -> bool:
        if not self.up:
            return False
        self.frames.append(frames)
        if (message := self.assembler.feed(frames)) is not None:
            self.messages.append(message)
        return True

    @property
    def ids(self) -> list[str]:
        return [message.id for message in self.messages]

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def done(name: str, settled: Callable[[], bool] = lambda: False) -> Event:
    message = GroupDone(id=name, batch_id="b", group_id="g", counts={}, complete=True)
    return Event(("group", name), lambda: message, settled)


def turn(name: str, tokens: int) -> Event:
    record = {"index": 0, "start": 0, "length": tokens, "finish_reason": "stop"}
    message = TurnDone.model_validate(
        {
            "id": name,
            "trajectory_id": name,
            "turn": record,
            "total_len": tokens,
            "token_ids": np.arange(tokens, dtype=np.int32),
            "logprobs": np.zeros(tokens, np.float32),
        }
    )
    return Event(("turn", name), lambda: message)


def size(event: Event) -> int:
    return sum(len(frame) for frame in encode(event.message()))


@on_loop
async def test_events_leave_in_order_and_the_two_ends_count_the_same() -> None:
    wire = Wire(10**6)
    for name in "abc":
        wire.sender.put(done(name))
    wire.sender.put(turn("d", 1000))
    await wire.settle()
    assert wire.ids == ["a", "b", "c", "d"]
    assert wire.sender.sent_bytes == wire.assembler.received_bytes > 8000


@on_loop
async def test_no_more_than_a_window_is_on_its_way_and_the_count_reopens_it() -> None:
    window, chunk = 5000, 1000
    wire = Wire(window, chunk)
    wire.sender.put(turn("big", 10_000))
    wire.sender.put(done("small"))
    rounds = 0
    while wire.ids != ["big", "small"]:
        await wire.settle()
        in_flight = wire.sender.sent_bytes - wire.sender.received_bytes
        assert window <= in_flight <= window + chunk + 500 or wire.sender.depth == 0
        wire.sender.received(wire.assembler.received_bytes)
        rounds += 1
    assert rounds >= 80_000 // (window + chunk + 500)
    assert wire.sender.stalls >= rounds - 1


@on_loop
async def test_the_ack_of_a_result_proves_that_all_before_it_arrived() -> None:
    first, second, third = turn("a", 300), turn("b", 300), turn("c", 300)
    wire = Wire(size(turn("a", 300)) + 1, 10**6)
    for event in (first, second, third):
        wire.sender.put(event)
    await wire.settle()
    assert wire.ids == ["a", "b"]
    wire.sender.taken(second)
    await wire.settle()
    assert wire.ids == ["a", "b", "c"]
    assert wire.received == [first, second]
    assert first.received
    assert not third.received


@on_loop
async def test_the_window_that_closes_with_the_last_byte_of_a_result_opens_with_its_ack() -> None:
    event = turn("a", 300)
    wire = Wire(size(turn("a", 300)), 10**6)
    wire.sender.put(event)
    wire.sender.put(done("b"))
    await wire.settle()
    assert wire.ids == ["a"]
    wire.sender.taken(event)
    await wire.settle()
    assert wire.ids == ["a", "b"]


@on_loop
async def test_a_count_of_bytes_never_sent_opens_nothing() -> None:
    wire = Wire(1000, 1000)
    wire.sender.received(10**12)
    wire.sender.put(turn("a", 1000))
    await wire.settle()
    assert wire.sender.sent_bytes < 3000
    wire.sender.received(500)
    wire.sender.received(0)
    assert wire.sender.received_bytes == 500


@on_loop
async def test_what_was_dropped_before_its_turn_is_not_sent() -> None:
    wire = Wire(10**6)
    events = [done(name) for name in "abc"]
    for event in events:
        wire.sender.put(event)
    events[1].dropped = True
    await wire.settle()
    assert wire.ids == ["a", "c"]
    assert wire.sender.depth == 0


@on_loop
async def test_what_was_dropped_half_way_is_finished_for_the_receivers_sake() -> None:
    wire = Wire(2000, 1000)
    event = turn("a", 1000)
    wire.sender.put(event)
    await wire.settle()
    assert wire.ids == []
    event.dropped = True
    while not wire.ids:
        wire.sender.received(wire.assembler.received_bytes)
        await wire.settle()
    assert not wire.assembler._open


@on_loop
async def test_a_reply_in_one_packet_is_not_counted_one_in_chunks_is() -> None:
    wire = Wire(10**6, 1000)
    for name, tokens in (("short", 10), ("long", 10_000)):
        message = Scored(id=name, weight_version=0, logprobs={"raw": (np.zeros(tokens, np.float32),)})
        wire.sender.put(Event(("reply", name), lambda message=message: message))
    await wire.settle()
    assert wire.ids == ["short", "long"]
    assert wire.sender.sent_bytes == wire.assembler.received_bytes > 40_000


@on_loop
async def test_replies_that_nobody_acknowledges_are_not_kept() -> None:
    wire = Wire(10**6)
    arrays = []
    for name in "abc":
        array = np.zeros(10, np.float32)
        message = Scored(id=name, weight_version=0, logprobs={"raw": (array,)})
        wire.sender.put(Event(("reply", name), lambda message=message: message))
        arrays.append(weakref.ref(array))
        del array, message
    await wire.settle()
    assert wire.ids == ["a", "b", "c"]
    wire.received.clear()
    wire.frames.clear()
    wire.messages.clear()
    assert all(array() is None for array in arrays)


@on_loop
async def test_a_gone_peer_ends_the_sender_without_an_exception() -> None:
    wire = Wire(10**6)
    wire.up = False
    wire.sender.put(done("a"))
    await wire.settle()
    assert wire.sender.closed
    wire.sender.put(done("b"))
    await wire.settle()
    assert wire.frames == []


@on_loop
async def test_a_message_that_cannot_be_made_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> ReplyMessage:
        raise ValueError("no such record")

    wire = Wire(10**6)
    wire.sender.put(Event(("trajectory", "x"), broken))
    wire.sender.put(done("b"))
    await wire.settle()
    assert wire.ids == ["b"]
    assert "no such record" in caplog.text


@on_loop
async def test_what_cannot_be_sent_is_stood_for_by_what_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def unsendable() -> GroupDone:
        return GroupDone.model_construct(id="a", batch_id="b", group_id=object(), counts={}, complete=True)

    def instead(error: Exception) -> GroupDone:
        return GroupDone(id="a", batch_id="b", group_id=str(error), counts={}, complete=False)

    wire = Wire(10**6)
    stood_for = Event(("group", "a"), unsendable, instead=instead)
    wire.sender.put(stood_for)
    wire.sender.put(Event(("group", "x"), unsendable, instead=lambda _: unsendable()))
    wire.sender.put(done("b"))
    await wire.settle()
    assert wire.ids == ["a", "b"]
    assert isinstance(wire.messages[0], GroupDone)
    assert wire.messages[0].group_id == "object cannot be sent"
    assert "nor can what was to stand for event ('group', 'x')" in caplog.text
    wire.sender.received(wire.assembler.received_bytes)
    assert stood_for.received


@on_loop
async def test_other_work_on_the_loop_gets_its_turn_in_a_long_queue() -> None:
    wire = Wire(10**9)
    for i in range(4 * BURST):
        wire.sender.put(done(str(i)))
    await asyncio.sleep(0)
    assert len(wire.messages) == BURST
    await asyncio.sleep(0)
    assert len(wire.messages) == 2 * BURST


@on_loop
async def test_an_event_sent_again_is_received_again() -> None:
    wire = Wire(10**6)
    event = done("a")
    wire.sender.put(event)
    await wire.settle()
    wire.sender.received(wire.assembler.received_bytes)
    assert event.received
    wire.sender.put(event)
    assert not event.received
    await wire.settle()
    wire.sender.received(wire.assembler.received_bytes)
    assert event.received
    assert wire.ids == ["a", "a"]
