"""A message of several frames through a socket, without waiting.

pyzmq's own calls for that ask the socket after each frame whether more follow, and combine flags in Python: with
eight frames a result that is most of what sending and receiving it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import zmq

LAST: Final = int(zmq.DONTWAIT)
MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)


def send(socket: zmq.Socket[Any], frames: Sequence[bytes | memoryview], *, copy: bool) -> None:
    """copy: else libzmq reads large frames where they are, for as long as it takes. Raises zmq.ZMQError."""
    *others, last = frames
    for frame in others:
        socket.send(frame, MORE, copy)
    socket.send(last, LAST, copy)


def receive(socket: zmq.Socket[Any]) -> list[zmq.Frame]:
    """Not copied. Raises zmq.Again where nothing waits."""
    frames = [socket.recv(LAST, False)]
    while frames[-1].more:
        frames.append(socket.recv(LAST, False))
    return frames
