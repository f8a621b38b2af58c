from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from rollout.wire.channel import BURST, UNREAD, BindError, Channel
from tests.rollout.workers import on_loop, soon


def channel(address: str = "tcp://127.0.0.1:0") -> Channel:
    return Channel(address, max_frame=2**20, heartbeat_timeout=60.0)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Channel, zmq.Socket[bytes]]]:
    router = channel()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.setsockopt(zmq.IDENTITY, b"peer")
        dealer.connect(router.address)
        yield router, dealer
        router.close(0.0)


@on_loop
async def test_messages_come_in_order_and_replies_go_back() -> None:
    async with pair() as (router, dealer):
        received: list[list[bytes]] = []

        def answer(peer: bytes, frames: list[zmq.Frame]) -> None:
            received.append([peer, *(frame.bytes for frame in frames)])
            assert router.send(peer, [b"re", frames[0].bytes])

        router.start(answer)
        for i in range(5 * BURST):
            dealer.send_multipart([str(i).encode(), b"x" * i])
        await soon(lambda: len(received) == 5 * BURST)
        assert [message[:2] for message in received] == [[b"peer", str(i).encode()] for i in range(5 * BURST)]
        for i in range(5 * BURST):
            assert dealer.poll(5000)
            assert dealer.recv_multipart() == [b"re", str(i).encode()]
        assert router.rx_bytes == sum(len(str(i)) + i for i in range(5 * BURST))
        assert router.tx_bytes == sum(2 + len(str(i)) for i in range(5 * BURST))


@on_loop
async def test_a_peer_that_reads_nothing_counts_as_gone_and_others_are_served() -> None:
    async with pair() as (router, dealer):
        deaf = dealer.context.socket(zmq.DEALER)
        deaf.linger, deaf.rcvhwm = 0, 1
        deaf.setsockopt(zmq.IDENTITY, b"deaf")
        deaf.connect(router.address)
        received: list[bytes] = []
        router.start(lambda peer, _frames: received.append(peer))
        deaf.send(b"here")
        dealer.send(b"here")
        await soon(lambda: len(received) == 2)
        sent = 0
        while router.send(b"deaf", [b"x" * 1000]):
            sent += 1
            assert sent < 3 * UNREAD
        assert sent >= UNREAD
        assert router.send(b"peer", [b"still"])
        assert dealer.poll(5000)
        assert dealer.recv() == b"still"
        deaf.close()


@on_loop
async def test_messages_that_came_before_start_are_not_lost() -> None:
    async with pair() as (router, dealer):
        dealer.send(b"early")
        await asyncio.sleep(0.1)
        received: list[list[bytes]] = []
        router.start(lambda peer, frames: received.append([peer, frames[0].bytes]))
        await soon(lambda: len(received) == 1)
        assert received == [[b"peer", b"early"]]


@on_loop
async def test_a_peer_that_does_not_exist_or_has_left_is_not_sent_to() -> None:
    async with pair() as (router, dealer):
        received: list[list[bytes]] = []
        router.start(lambda peer, _: received.append([peer]))
        assert not router.send(b"nobody", [b"x"])
        dealer.send(b"hello")
        await soon(lambda: len(received) == 1)
        assert router.send(b"peer", [b"x"])
        dealer.close()
        await soon(lambda: not router.send(b"peer", [b"x"]))


@on_loop
async def test_other_work_gets_its_turn_between_bursts() -> None:
    async with pair() as (router, dealer):
        received: list[list[bytes]] = []
        longest = turn = 0

        def count(peer: bytes, _: list[zmq.Frame]) -> None:
            nonlocal longest, turn
            received.append([peer])
            turn += 1
            longest = max(longest, turn)

        for _ in range(20 * BURST):
            dealer.send(b"x")
        await asyncio.sleep(0.1)
        router.start(count)
        while len(received) < 20 * BURST:
            await asyncio.sleep(0)
            turn = 0
        assert longest <= 2 * BURST


@on_loop
async def test_nothing_is_read_after_close() -> None:
    async with pair() as (router, dealer):
        received: list[list[bytes]] = []

        def close(peer: bytes, _: list[zmq.Frame]) -> None:
            received.append([peer])
            router.close(0.0)

        for _ in range(10):
            dealer.send(b"x")
        await asyncio.sleep(0.1)
        router.start(close)
        await soon(lambda: len(received) == 1)
        await asyncio.sleep(0.05)
        assert len(received) == 1


# Addresses.


def test_an_address_in_use_says_so() -> None:
    first = channel("tcp://127.0.0.1:0")
    with pytest.raises(BindError, match=r"is in use, perhaps by another worker.*--bind"):
        channel(first.address)
    first.close(0.0)
    channel(first.address).close(0.0)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5555", "tcp://127.0.0.1", "http://127.0.0.1:80", "tcp://no.such.host.example:1"]
)
def test_an_address_that_cannot_be_bound_says_what_one_looks_like(address: str) -> None:
    with pytest.raises(BindError, match="tcp://HOST:PORT"):
        channel(address)


def test_an_ipc_address_in_use_says_so_and_one_left_by_a_dead_worker_is_taken(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/worker"
    first = channel(address)
    with pytest.raises(BindError, match="is in use"):
        channel(address)
    first.close(0.0)
    assert not list(tmp_path.iterdir())
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "worker"))
    channel(address).close(0.0)


def test_a_port_that_something_else_has_taken_says_so() -> None:
    other = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(other), pytest.raises(BindError, match="in use"):
        channel(f"tcp://127.0.0.1:{other.getsockname()[1]}")
