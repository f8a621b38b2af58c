"""A connection's life on the I/O thread: connect, greet, stay in touch, notice the end, begin again.

connecting --handshake--> greeting --welcome--> up
    ^                                            |
    +---- disconnected, silent, not understood --+
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from protocols.chunks import Assembler
from protocols.codec import encode
from protocols.errors import BadRequest, ConnectionLost, Internal, RolloutError, from_failure
from protocols.fields import Limits
from protocols.replies import ErrorReply, Reply, Welcome
from protocols.requests import Hello, Ping, RequestMessage
from rollout.client.link import Change, Link

log = logging.getLogger(__name__)

PING_S = 2.0
HELLO_AGAIN_S = 0.5
TELL_S = 5.0
"""A call may wait for minutes: who forgot to start the worker should not have to wonder that long."""
BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
FOREVER = float("inf")


class Handler(Protocol):
    def welcomed(self, welcome: Welcome) -> None: ...
    def lost(self) -> None: ...
    def refused(self, error: RolloutError) -> None:
        """The worker will never welcome this client."""

    def received(self, message: Reply) -> None: ...
    def unreadable(self, error: BadRequest) -> bool:
        """Returns False when the message may have mattered, so that a new connection must bring it again."""

    def counted(self, window_bytes: int) -> None:
        """`received_bytes` has grown."""

    def pinged(self) -> None: ...


class Connection:
    """timeout: seconds without an answer to hello or ping after which the connection is made anew."""

    def __init__(
        self, link: Link, handler: Handler, *, name: str, session: str | None, timeout: float, new_id: Callable[[], str]
    ) -> None:
        self._link = link
        self._handler = handler
        self._name = name
        self._timeout = timeout
        self._ping_every = min(PING_S, timeout / 4)
        self._new_id = new_id
        self._state: Literal["connecting", "greeting", "up", "refused"] = "connecting"
        self._limits = Limits()
        self._assembler = Assembler(self._limits)
        self._unread_bytes = 0  # of events that were not understood and do not matter any more
        self._session = session
        self._hello_id = ""
        self._hello_sent = self._heard = self._pinged = 0.0
        self._hello_at = FOREVER
        self._open_at = 0.0
        self._failures = 0
        self._refusal: RolloutError | None = None
        self._told = False
        self.down_since = time.monotonic()

    @property
    def up(self) -> bool:
        return self._state == "up"

    @property
    def received_bytes(self) -> int:
        """What `ack` reports: bytes of event frames received on this connection."""
        return self._assembler.received_bytes + self._unread_bytes

    def no_worker(self, seconds: float) -> RolloutError:
        """Why nothing was heard for so long."""
        address = self._link.address
        return self._refusal or ConnectionLost(
            f"no worker answers at {address} after {seconds:.3g} s: is a rollout-worker running with that --bind?"
        )

    def next_deadline(self) -> float:
        return min(self._open_at, self._hello_at, time.monotonic() + self._ping_every)

    def send(self, message: RequestMessage) -> None:
        self._link.send(encode(message))

    def send_frames(self, frames: Sequence[bytes | memoryview]) -> None:
        self._link.send(frames)

    def advance(self) -> None:
        """Read what has come, then look at the clock: a thread that was held up has not lost its worker."""
        while (frames := self._link.receive()) is not None:
            self._heard = time.monotonic()
            self._read(frames)
            if self.up:
                self._handler.counted(self._limits.window_bytes)
        for change in self._link.changes():
            self._changed(change)
        self._watch(time.monotonic())

    def _read(self, frames: Sequence[memoryview]) -> None:
        counted = self._assembler.received_bytes
        try:
            message = self._assembler.feed(frames)
        except BadRequest as error:
            if not self._handler.unreadable(error):
                self.reset(f"not understood: {error}")
            elif self._assembler.received_bytes == counted:
                self._unread_bytes += sum(frame.nbytes for frame in frames)
            return
        if message is not None:
            self._take(message)

    def reset(self, reason: str) -> None:
        """Give this connection up and make another."""
        log.info("connection to %s: %s", self._link.address, reason)
        self._link.drop()
        if self.up:
            self.down_since = time.monotonic()
            self._failures = 0
        self._state = "connecting"
        self._hello_at = FOREVER
        self._open_at = time.monotonic() + min(MAX_BACKOFF_S, BACKOFF_S * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        self._handler.lost()

    def _changed(self, change: Change) -> None:
        if change is Change.UP and self._state == "connecting":
            self._greet()
        elif change is Change.DOWN and self._state != "connecting":
            self.reset("disconnected")
        elif change is Change.REFUSED:
            self._refusal = ConnectionLost(f"{self._link.address} refused the handshake: are the curve keys right?")

    def _greet(self) -> None:
        self._state = "greeting"
        self._hello_at = FOREVER
        self._hello_sent = time.monotonic()
        self._hello_id = self._new_id()
        self._assembler = Assembler(self._limits)
        self.send(Hello(id=self._hello_id, client=self._name, session=self._session))

    def _take(self, message: Reply) -> None:
        if self._state == "up":
            self._handler.received(message)
        elif message.id != self._hello_id or self._state != "greeting":
            log.debug("%s before the welcome", message.type)
        elif isinstance(message, Welcome):
            self._state = "up"
            self._told = False
            self._session = message.session
            self._limits = message.limits
            self._refusal = None
            self._assembler = Assembler(message.limits)
            self._unread_bytes = 0
            self._pinged = self._heard
            self._handler.welcomed(message)
        else:
            self._refused(message)

    def _refused(self, message: Reply) -> None:
        if isinstance(message, ErrorReply):
            refusal = from_failure(message.error)
        else:
            refusal = Internal(f"the worker answered hello with {message.type!r}")
        if refusal.retryable:
            self._refusal = refusal
            self._hello_at = time.monotonic() + HELLO_AGAIN_S
            return
        self._state = "refused"
        self._link.drop()
        self._handler.refused(refusal)

    def _watch(self, now: float) -> None:
        if now >= self._open_at:
            self._open_at = FOREVER
            self._link.open()
        if now >= self._hello_at:
            self._greet()
        if self._state == "greeting" and self._hello_at == FOREVER and now - self._hello_sent >= self._timeout:
            self.reset(f"no welcome for {self._timeout:g} s")
        if not self.up:
            if not self._told and self._state != "refused" and now - self.down_since >= TELL_S:
                self._told = True
                log.warning("%s Still trying", self.no_worker(now - self.down_since))
            return
        if self._pinged > self._heard:
            if now - self._pinged >= self._timeout:
                self.reset(f"no sign of life for {self._timeout:g} s")
        elif now - self._pinged >= self._ping_every:
            self._pinged = now
            self.send(Ping(id=self._new_id()))
            self._handler.pinged()
