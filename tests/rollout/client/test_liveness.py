"""A worker that is not there, goes away, or falls silent is noticed; one that is merely slow is waited for."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import zmq

from protocols import ConnectionLost, Hello, Ping, StatusRequest, SubmitBatch, Timeout
from rollout.client import RolloutClient
from tests.rollout.client.fake_worker import FakeWorker

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]
Later = Callable[..., Future[Any]]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_an_absent_worker_is_named(connect: Connect) -> None:
    address = free_address()
    client = connect(address, timeout=0.3)
    for call in (
        client.connect,
        client.ping,
        lambda: client.submit(client.group([1])),
        lambda: client.score([[1]], timeout=0.2),
    ):
        with pytest.raises(ConnectionLost, match=f"no worker answers at {address} after 0.[23] s") as error:
            call()
        assert error.value.retryable


def test_a_long_wait_for_an_absent_worker_is_logged_once(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.client.connection.TELL_S", 0.1)
    address = free_address()
    client = connect(address, timeout=0.2)
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            client.connect(timeout=0.5)
    assert caplog.text.count(f"no worker answers at {address}") == 1


def test_a_worker_that_comes_later_is_found(start: Start, connect: Connect, later: Later) -> None:
    address = free_address()
    client = connect(address)
    batch = later(client.submit, client.group([1], n=2))
    status = later(client.status)
    with pytest.raises(ConnectionLost):
        client.ping(timeout=0.5)
    start(address)
    assert len(batch.result(10).results()) == 2
    assert status.result(10).boot_id == "boot-1"


def test_no_reply_says_who_and_how_long(start: Start, connect: Connect) -> None:
    worker = start()
    client = connect(worker)
    client.connect()
    worker.refuse(StatusRequest, None)
    with pytest.raises(Timeout, match=f"no reply to StatusRequest from {worker.address} in 0.2 s"):
        client.status(timeout=0.2)
    assert client.ping().boot_id == "boot-1"


def test_a_dead_worker_ends_the_wait_and_its_successor_goes_on(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker, reconnect_timeout=0.4)
    batch = client.submit(client.group([1], n=2))
    worker.stop()
    for _ in range(2):  # at once the second time: nobody has come
        with pytest.raises(ConnectionLost, match=f"no worker answers at {worker.address}"):
            next(iter(batch))
    with pytest.raises(ConnectionLost):
        client.submit(client.group([1]), timeout=0.2)
    start(worker.address, boot_id="boot-2")
    client.ping()
    assert len(batch.results()) == 2


def test_a_worker_back_in_time_is_not_even_mentioned(start: Start, connect: Connect, later: Later) -> None:
    worker = start(hold=True)
    client = connect(worker)
    results = later(client.submit(client.group([1], n=2)).results)
    worker.stop()
    start(worker.address, boot_id="boot-2")
    assert len(results.result(10)) == 2


def test_a_silent_worker_is_left_and_greeted_again(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker, timeout=0.4, reconnect_timeout=0.4)
    batch = client.submit(client.group([1]))
    worker.refuse(Ping, None)
    worker.refuse(Hello, None)
    with pytest.raises(ConnectionLost):
        next(iter(batch))
    assert worker.kinds().count("hello") >= 2
    worker.answers.clear()
    worker.finish()
    client.ping(timeout=10)
    assert len(batch.results()) == 1
    assert worker.kinds().count("submit") == 1


def test_a_long_batch_on_a_live_worker_is_waited_for(start: Start, connect: Connect, later: Later) -> None:
    worker = start(hold=True)
    client = connect(worker, timeout=0.4, reconnect_timeout=0.4)
    results = later(client.submit(client.group([1])).results)
    worker.wait_for(lambda: len(worker.of(Ping)) >= 12)  # three times the timeout, by the client's own clock
    assert not results.done()
    assert worker.kinds() == ["hello", "submit"]
    worker.finish()
    assert len(results.result(10)) == 1


def test_a_thread_held_up_has_not_lost_its_worker(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The I/O thread wakes long after its ping; the answer has been waiting for it."""
    worker = start(hold=True)
    client = connect(worker, timeout=0.4)
    batch = client.submit(client.group([1]))
    offset = [0.0]
    clock = time.monotonic
    monkeypatch.setattr("rollout.client.connection.time.monotonic", lambda: clock() + offset[0])
    pings = len(worker.of(Ping))
    worker.wait_for(lambda: len(worker.of(Ping)) > pings)
    offset[0] = 60.0
    pings = len(worker.of(Ping))
    worker.wait_for(lambda: len(worker.of(Ping)) > pings + 1)
    assert worker.kinds() == ["hello", "submit"]
    worker.finish()
    assert len(batch.results()) == 1


def test_curve_keys_that_fit_and_that_do_not(start: Start, connect: Connect) -> None:
    public, secret = zmq.curve_keypair()
    worker = start(curve=(public, secret))
    assert connect(worker, curve_server_key=public.decode()).ping().boot_id == "boot-1"
    mine, my_secret = zmq.curve_keypair()
    keys = {"curve_public_key": mine, "curve_secret_key": my_secret}
    assert connect(worker, curve_server_key=public, **keys).ping().boot_id == "boot-1"
    with pytest.raises(ConnectionLost):
        connect(worker, timeout=0.5).ping()
    other, _ = zmq.curve_keypair()
    with pytest.raises(ConnectionLost):
        connect(worker, timeout=0.5, curve_server_key=other.decode()).ping()
    assert len(worker.of(Hello)) == 2
    assert not worker.of(SubmitBatch)
