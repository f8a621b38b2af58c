"""A client from its address to its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocols import BadRequest, Cancel, Internal
from rollout.client import ClientClosed, RolloutClient
from rollout.client.loop import Loop
from tests.rollout.client.fake_worker import FakeWorker

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6_addresses(start: Start, connect: Connect) -> None:
    assert connect(start("tcp://[::1]:*")).ping().boot_id == "boot-1"


def test_ipc_addresses(start: Start, connect: Connect, tmp_path: Path) -> None:
    assert connect(start(f"ipc://{tmp_path}/worker")).ping().boot_id == "boot-1"


def test_use_after_close_raises(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=2)
    batch = client.submit(group)
    worker.finish(group.trajectory_ids[0])
    client.ping()  # the record came before its answer
    client.close()
    client.close()
    for call in (client.ping, lambda: client.submit(client.group([1])), lambda: next(iter(batch))):
        with pytest.raises(ClientClosed):
            call()
    worker.wait_for(lambda: worker.of(Cancel))
    assert worker.of(Cancel)[0].trajectory_ids == group.trajectory_ids[1:]


def test_closing_with_open_work_says_so(start: Start, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(start(hold=True))
    batch = client.submit(client.group([1], n=2))
    client.close()
    assert "2 trajectories open" in caplog.text
    del batch


def test_closing_without_cancel_leaves_the_work_to_the_session(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    first = connect(worker)
    group = first.group([1], n=2, id="g")
    batch = first.submit(group, batch_id="b")
    first.close(cancel=False)
    with pytest.raises(ClientClosed):
        next(iter(batch))
    assert not worker.of(Cancel)
    second = connect(worker, session=first.session)
    assert second.connect().resumed
    assert second.session == first.session
    batch = second.submit(group, batch_id="b")
    worker.finish()
    assert len(batch.results()) == 2


def test_closing_wakes_whoever_waits(start: Start, connect: Connect) -> None:
    client = connect(start(hold=True))
    batch = client.submit(client.group([1]))
    errors: list[BaseException] = []

    def iterate() -> None:
        try:
            next(iter(batch))
        except ClientClosed as error:
            errors.append(error)

    thread = threading.Thread(target=iterate)
    thread.start()
    client.close()
    thread.join(10)
    assert len(errors) == 1


def test_bad_addresses_and_options_are_refused_at_once() -> None:
    for address in (
        "127.0.0.1:5557",
        "tcp://nowhere",
        "inproc://x",
        "tcp://a b:1",
        "",
        "tcp://a:0",
        "tcp://a:65536",
        None,
    ):
        with pytest.raises(BadRequest, match="address"):
            RolloutClient(address)  # type: ignore[arg-type]


KEY = "a" * 40


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout": 0}, "timeout"),
        ({"reconnect_timeout": -1}, "reconnect_timeout"),
        ({"name": 5}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x" * 257}, "name"),
        ({"session": 5}, "session"),
        ({"session": ""}, "session"),
        ({"curve_public_key": KEY, "curve_secret_key": KEY}, "curve_server_key"),
        ({"curve_server_key": KEY, "curve_secret_key": KEY}, "curve_public_key"),
        ({"curve_server_key": KEY, "curve_public_key": KEY}, "curve_secret_key"),
        ({"curve_server_key": KEY[1:]}, "curve_server_key"),
        ({"curve_server_key": '"' * 40}, "curve_server_key"),
        ({"curve_server_key": "#" * 40}, "curve_server_key"),
        ({"curve_server_key": "ä" * 20}, "curve_server_key"),
        ({"curve_server_key": KEY, "curve_public_key": KEY, "curve_secret_key": 5}, "curve_secret_key"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, Any], field: str) -> None:
    """Later, on a thread of its own, nobody would know which it was."""
    with pytest.raises(BadRequest) as caught:
        RolloutClient("tcp://127.0.0.1:1", **options)
    assert caught.value.field == field


def test_a_fault_of_the_clients_own_thread_is_told_to_everybody_who_waits(
    start: Start, connect: Connect, later: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("unforeseen")

    client = connect(start(hold=True))
    waiting = later(client.submit(client.group([1])).results)
    monkeypatch.setattr(Loop, "request", broken)
    with pytest.raises(Internal, match="I/O thread failed: RuntimeError: unforeseen"):
        client.ping()
    with pytest.raises(Internal, match="unforeseen"):
        waiting.result(10)
    with pytest.raises(Internal, match="unforeseen"):
        client.status()
