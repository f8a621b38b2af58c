"""The worker's ROUTER socket on the event loop.

The socket is read through its file descriptor and written without waiting: a send either hands the frames to libzmq
or says that the peer is gone. What may be sent is decided elsewhere (sender.py).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from rollout.wire.curve import CurveKeys
from rollout.wire.multipart import receive, send

BURST = 64
"""Messages read before other work on the loop gets its turn."""

UNREAD = 32_768
"""Messages a peer may leave unread before it counts as gone: more than any window holds, and replies have no window,
so that a peer which asks and never reads would fill the memory."""


class BindError(Exception):
    """The address cannot be served; the message says what to do."""


class Channel:
    """address: a ZeroMQ endpoint; port 0 or * is chosen by the system. Raises BindError.

    max_frame: bytes; a peer that sends a larger frame is disconnected by libzmq before it is read.
    heartbeat_timeout: seconds without a sign of life on the TCP level after which a connection is closed. Heartbeats
        are answered by the peer's I/O thread, also while its interpreter is busy.
    """

    def __init__(
        self, address: str, *, max_frame: int, heartbeat_timeout: float, curve: CurveKeys | None = None
    ) -> None:
        self.rx_bytes = 0
        self.tx_bytes = 0
        self._fd: int | None = None
        self._scheduled = False
        self._context = zmq.Context()
        self._guard = curve.guard(self._context) if curve else None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, UNREAD)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_timeout * 250)))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(heartbeat_timeout * 1000)))
        if curve:
            curve.protect(self._socket)
        self._file = _socket_file(address)
        try:
            if self._file is not None and _served(self._file):
                raise zmq.ZMQError(errno.EADDRINUSE)
            self._socket.bind(f"{address[:-1]}*" if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            self._file = None
            self.close(linger=0.0)
            raise BindError(_bind_advice(address, error)) from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def start(self, receive: Callable[[bytes, list[zmq.Frame]], None]) -> None:
        """Call `receive(peer, frames)` on the running loop for every message from now on."""
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._read)
        self._read_soon()

    def send(self, peer: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Hand a message over. False: there is no connection of that name, or nobody reads at its other end."""
        try:
            send(self._socket, [peer, *frames], copy=False)
        except zmq.ZMQError as error:
            # The last: a last task ends after the socket was closed.
            if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN, zmq.ENOTSOCK):
                raise
            return False
        finally:
            self._read_soon()
        self.tx_bytes += sum(map(len, frames))
        return True

    def close(self, linger: float) -> None:
        """Close; what is still queued gets `linger` seconds to leave."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            self._fd = None
        self._socket.close(linger=int(linger * 1000))
        if self._guard is not None:
            self._guard.stop()
        self._context.term()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def _read_soon(self) -> None:
        # The descriptor is edge-triggered, and any call on the socket may take the edge: look again after each.
        if not self._scheduled and self._fd is not None:
            self._scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._scheduled = False
        for _ in range(BURST):
            if self._fd is None:
                return
            try:
                peer, *frames = receive(self._socket)
            except zmq.Again:
                return
            self.rx_bytes += sum(map(len, frames))
            self._receive(peer.bytes, frames)
        self._read_soon()


def _socket_file(address: str) -> Path | None:
    """The file of an ipc address, except where libzmq makes one up or the name is an abstract one."""
    path = address.removeprefix("ipc://")
    return Path(path) if path != address and path != "*" and not path.startswith("@") else None


def _served(file: Path) -> bool:
    """Does somebody listen on it? libzmq would take a file over, from a live worker as well as from a dead one."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(file))
        except OSError:
            return False
    return True


def _bind_advice(address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use, perhaps by another worker: stop that one or choose another --bind"
    if error.errno == errno.EACCES:
        other = "let this user write its directory" if address.startswith("ipc:") else "choose a port above 1023"
        return f"not allowed to bind {address}: {other}"
    return f"cannot bind {address}: {zmq.strerror(error.errno or 0)}; --bind takes tcp://HOST:PORT or ipc://PATH"
