"""Bulk to one connection: messages in order and in pieces, at most a window of bytes on their way.

Replies to control calls do not come here: they are sent at once and so wait behind no more than the window. It opens
again by the client's count of received bytes, or by the ack of a result, which proves that everything up to the
result's last byte arrived. A client that never counts must not ask for results larger than the window.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from protocols.chunks import Packet, split
from protocols.codec import encode
from protocols.replies import ReplyMessage, is_event
from rollout.wire.outbox import Event

log = logging.getLogger(__name__)

BURST = 32
"""Packets sent before other work on the loop gets its turn."""


class Sender:
    """send: hands frames over, False when the peer is gone (then the sender is of no further use).

    on_received: called with each event once its receipt is known.
    """

    def __init__(
        self,
        send: Callable[[list[bytes | memoryview]], bool],
        *,
        window_bytes: int,
        chunk_bytes: int,
        on_received: Callable[[Event], None],
    ) -> None:
        self._send = send
        self._window_bytes = window_bytes
        self._chunk_bytes = chunk_bytes
        self._on_received = on_received
        self._queue: deque[Event] = deque()
        self._packets: deque[tuple[Packet, int]] = deque()
        self._current: Event | None = None
        self._in_flight: deque[Event] = deque()
        self._scheduled: asyncio.Handle | None = None
        self._messages = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.stalls = 0
        self.closed = False

    @property
    def depth(self) -> int:
        """Events not yet wholly sent."""
        return len(self._queue) + (self._current is not None)

    def put(self, event: Event) -> None:
        event.received, event.end = False, None
        self._queue.append(event)
        self._pump_soon()

    def received(self, nbytes: int) -> None:
        """The client has counted `nbytes` of event frames on this connection. Counts never go back."""
        self.received_bytes = max(self.received_bytes, min(nbytes, self.sent_bytes))
        self._land()
        self._pump_soon()

    def taken(self, event: Event) -> None:
        """The client acknowledged `event`, so everything up to its end has arrived."""
        if event.end is not None:
            self.received(event.end)

    def _land(self) -> None:
        while self._in_flight and (self._in_flight[0].end or 0) <= self.received_bytes:
            event = self._in_flight.popleft()
            event.received = True
            self._on_received(event)

    def close(self) -> None:
        self.closed = True
        if self._scheduled:
            self._scheduled.cancel()
        self._queue.clear()
        self._packets.clear()
        self._in_flight.clear()
        self._current = None

    def _pump_soon(self) -> None:
        if self._scheduled is None and not self.closed and self.depth:
            self._scheduled = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = None
        for _ in range(BURST):
            if self._current is None and not self._load():
                return
            if self.sent_bytes - self.received_bytes >= self._window_bytes:
                self.stalls += 1
                return
            packet, counted = self._packets.popleft()
            if not self._send(packet.frames):
                self.close()
                return
            self.sent_bytes += counted
            if not self._packets and self._current is not None:
                self._current.end = self.sent_bytes
                self._in_flight.append(self._current)
                self._current = None
                self._land()  # a reply that counts for nothing is acknowledged by nobody
        self._pump_soon()

    def _load(self) -> bool:
        """Cut the next message that is still wanted into packets. False when there is none."""
        while self._queue:
            event = self._queue.popleft()
            if event.dropped:
                continue
            try:
                self._cut(event.message())
            except Exception as error:
                log.exception("event %s cannot be sent", event.key)
                if not self._cut_instead(event, error):
                    continue
            self._current = event
            return True
        return False

    def _cut_instead(self, event: Event, error: Exception) -> bool:
        if event.instead is None:
            return False
        try:
            self._cut(event.instead(error))
        except Exception:
            log.exception("nor can what was to stand for event %s", event.key)
            return False
        return True

    def _cut(self, message: ReplyMessage) -> None:
        frames = encode(message)
        self._messages += 1
        packets = list(split(frames, self._chunk_bytes, number=self._messages, message_id=message.id))
        # The client counts events and chunks; a reply (`scored`) that fits into one packet is neither.
        counts = len(packets) > 1 or is_event(message)
        self._packets.extend([(packet, packet.nbytes if counts else 0) for packet in packets])
