"""The socket: one DEALER per connection, so that what was queued for a lost connection is never sent on another.

Used by the I/O thread alone, except that any thread may write a byte to `waker`.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import zmq

from protocols.errors import BadRequest
from rollout.wire import multipart
from rollout.wire.keys import is_key

HEARTBEAT_IVL_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
HANDSHAKE_TIMEOUT_MS = 5000
RECONNECT_MS = (100, 1000)

_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)


Key = str | bytes
"""Z85: 40 characters of text, or what `zmq.auth.load_certificate` gives."""


class Change(Enum):
    UP = "connected"
    DOWN = "disconnected"
    REFUSED = "handshake refused"


@dataclass(frozen=True, slots=True)
class Curve:
    """Keys in Z85. The client's own pair is made up unless given."""

    server_key: bytes
    public_key: bytes
    secret_key: bytes

    @staticmethod
    def of(server_key: Key | None, public_key: Key | None, secret_key: Key | None) -> Curve | None:
        """Raises BadRequest naming the key that is wrong or missing."""
        given = {"curve_server_key": server_key, "curve_public_key": public_key, "curve_secret_key": secret_key}
        keys = {field: _z85(key, field) for field, key in given.items() if key is not None}
        if not keys:
            return None
        for field, others in (
            ("curve_server_key", ("curve_public_key", "curve_secret_key")),
            ("curve_public_key", ("curve_secret_key",)),
            ("curve_secret_key", ("curve_public_key",)),
        ):
            if field not in keys and (needs := next((other for other in others if other in keys), None)):
                raise BadRequest(f"is missing, and {needs} is given", field=field)
        public, secret = zmq.curve_keypair()
        return Curve(
            keys["curve_server_key"], keys.get("curve_public_key", public), keys.get("curve_secret_key", secret)
        )


def _z85(key: Key, field: str) -> bytes:
    text = key.encode() if isinstance(key, str) else key
    if not isinstance(text, bytes) or not is_key(text):
        raise BadRequest("must be 40 characters of Z85 text", field=field)
    return text


class Link:
    def __init__(self, address: str, curve: Curve | None, wakeup: socket.socket) -> None:
        self.address = address
        self._curve = curve
        self._wakeup = wakeup
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._poller = zmq.Poller()
        self._poller.register(wakeup.fileno(), zmq.POLLIN)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._changed = False

    def open(self) -> None:
        """Begin to connect; libzmq tries again until somebody listens. `Change.UP` follows."""
        if self._context is None:
            self._context = zmq.Context()
        dealer = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_IVL_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS),
            (zmq.IPV6, int(self.address.startswith("tcp://["))),
            (zmq.RECONNECT_IVL, RECONNECT_MS[0]),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1]),
        ):
            dealer.setsockopt(option, value)
        if self._curve:
            dealer.curve_serverkey = self._curve.server_key
            dealer.curve_publickey = self._curve.public_key
            dealer.curve_secretkey = self._curve.secret_key
        self._monitor = dealer.get_monitor_socket(_EVENTS)
        self._socket = dealer
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(dealer, zmq.POLLIN)
        dealer.connect(self.address)

    def drop(self, linger_ms: int = 0) -> None:
        """Close the connection; `linger_ms` bounds how long what was sent may still go out."""
        if self._socket is None or self._monitor is None:
            return
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._socket = self._monitor = None

    def close(self, linger_ms: int) -> None:
        self.drop(linger_ms)
        if self._context is not None:
            self._context.term()

    def wait(self, seconds: float) -> None:
        """Until something arrives, somebody calls, or time is up."""
        ready = self._poller.poll(max(0, math.ceil(seconds * 1000)))
        self._changed = any(found is self._monitor for found, _ in ready)
        try:
            while self._wakeup.recv(4096):
                pass
        except BlockingIOError:
            pass

    def changes(self) -> Iterator[Change]:
        """Those that the last `wait` found."""
        while self._changed and self._monitor is not None:
            try:
                data, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, _ = struct.unpack("=hi", data)
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                yield Change.UP
            else:
                yield Change.DOWN if event == zmq.Event.DISCONNECTED else Change.REFUSED

    def receive(self) -> list[memoryview] | None:
        """The frames of one message, not copied; None when none waits."""
        if self._socket is None:
            return None
        try:
            return [frame.buffer for frame in multipart.receive(self._socket)]
        except zmq.Again:
            return None

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        assert self._socket is not None
        multipart.send(self._socket, frames, copy=True)
