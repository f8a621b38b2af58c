"""Messages of several frames, through a real pair of sockets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from rollout.wire.multipart import receive, send

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://pair")
        other.connect("inproc://pair")
        yield one, other


@pytest.mark.parametrize("copy", [True, False])
def test_each_message_comes_with_its_own_frames_whatever_their_size(pair: Pair, copy: bool) -> None:
    one, other = pair
    large = np.arange(10**5).view(np.uint8).data
    messages = [[b"a"], [b"", b"b", b""], [b"c", large, memoryview(b"d")], [large]]
    for frames in messages:
        send(one, frames, copy=copy)
    for frames in messages:
        assert [frame.bytes for frame in receive(other)] == [bytes(frame) for frame in frames]


def test_nothing_is_waited_for(pair: Pair) -> None:
    one, other = pair
    with pytest.raises(zmq.Again):
        receive(other)
    one.sndhwm = other.rcvhwm = 1

    def fill() -> None:
        for _ in range(10**5):
            send(one, [b"x", b"y"], copy=True)

    with pytest.raises(zmq.Again):
        fill()
