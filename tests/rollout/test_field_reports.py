"""Faults that others have reported of systems like this one, each as a test of its kind.

The number in a name is the report's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest

from engine.request import Completion, FinishReason, Request
from rollout.local import local_worker
from rollout.service.service import Timeouts
from tests import rigs
from tests.rollout.raw_client import ARRAY, RawClient, group
from tests.rollout.timed_engine import TimedEngine, reply_ids
from tests.rollout.unharmed import unharmed
from tests.rollout.workers import ROOT, WorkerProcess, WorkerThread, eventually, worker


def submit(client: RawClient, *groups: dict[str, Any], batch: str = "b") -> dict[str, Any]:
    return client.call("submit", batch_id=batch, groups=list(groups))


@contextmanager
def checked(engine: TimedEngine | None = None, **options: Any) -> Iterator[WorkerThread]:
    """A worker that must be as good as new after the check."""
    threads = threading.active_count()
    with worker(engine, **options) as served:
        with unharmed(served.address, smoke=reply_ids(3, 4).tolist()):
            yield served
            served.engine.seconds_per_token = 0.0
        assert not served.engine.live
        assert served.service.runs.admission.reserved_bytes == 0
    eventually(lambda: threading.active_count() <= threads)


# 30: two live requests with one id.


def test_30_an_id_that_is_running_is_refused_and_its_owner_untouched() -> None:
    with checked(TimedEngine(0.002)) as served, RawClient(served.address) as one, RawClient(served.address) as two:
        one.hello()
        two.hello()
        submit(one, group("r1", max_tokens=200))
        time.sleep(0.05)
        assert submit(one, group("r1", max_tokens=100))["error"]["code"] == "duplicate"
        # Ids are scoped by session: another client's r1 is another trajectory.
        assert submit(two, group("r1", max_tokens=50))["type"] == "accepted"
        assert len(two.record()["segments"][0]["token_ids"]) == 53
        assert len(one.record()["segments"][0]["token_ids"]) == 203
        assert submit(one, group("r1", max_tokens=100))["type"] == "accepted"
        assert len(one.record()["segments"][0]["token_ids"]) == 103


@pytest.mark.parametrize("name", ["", "x" * 10_000, b"r1", 7, None, ["r1"], 1.5, True])
def test_30_an_id_that_is_no_name_is_refused_by_its_path(name: Any) -> None:
    with checked() as served, RawClient(served.address) as client:
        client.hello()
        error = submit(client, group() | {"trajectory_ids": ["fine", name]})["error"]
        assert (error["code"], error["field"]) == ("bad_request", "groups[0].trajectory_ids[1]")
        assert submit(client, group() | {"id": name})["error"]["field"] == "groups[0].id"


# 32: an abort that comes too late.


def test_32_an_abort_of_what_is_not_running_is_acknowledged_and_changes_nothing() -> None:
    with checked() as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group("finished"))
        client.record()
        for names, unknown in ((["finished.0"], 1), (["never"], 1), (["never", "never"], 2)):
            found = client.call("cancel", trajectory_ids=names)["detail"]
            assert found == {"cancelled": 0, "ended": 0, "unknown": unknown}


def test_32_an_abort_in_the_same_burst_as_the_last_token() -> None:
    with checked() as served, RawClient(served.address) as client:
        client.hello()
        for i in range(50):
            client.send("submit", batch_id=f"b{i}", groups=[group(f"g{i}")])
            client.send("cancel", trajectory_ids=[f"g{i}.0"])
            client.send("cancel", trajectory_ids=[f"g{i}.0"])
        records = [client.record() for _ in range(50)]
        assert {record["trajectory_id"] for record in records} == {f"g{i}.0" for i in range(50)}
        for record in records:
            assert record["finish_reason"] in ("abort_client", "length")
            lengths = {len(record["segments"][0][name]) for name in ("token_ids", "logprobs", "loss_mask")}
            assert len(lengths) == 1


def test_32_an_aborted_request_ends_once_with_what_it_has() -> None:
    with checked(TimedEngine(0.002)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(max_tokens=5000))
        time.sleep(0.1)
        assert client.call("cancel", trajectory_ids=["g.0", "g.0"])["detail"]["cancelled"] == 1
        client.call("cancel", batch_ids=["b"])
        record = client.record()
        segment = record["segments"][0]
        assert (record["status"], record["finish_reason"]) == ("aborted", "abort_client")
        assert 3 < len(segment["token_ids"]) < 2000
        assert segment["loss_mask"].sum() == len(segment["token_ids"]) - 3
        client.event("batch_done")
        assert client.nothing(0.1)


# 34: the client is gone, generation runs on.


def busy_client(address: str, name: str, tokens: int, environment: str = "scripted", hold: float = 0.0) -> Any:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rollout.busy_client", address, name, str(tokens), environment, str(hold)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_34_nothing_runs_on_for_killed_clients_and_others_do_not_notice() -> None:
    # The command's own timeouts.
    with checked(TimedEngine(0.05), timeouts=Timeouts()) as served, RawClient(served.address) as other:
        other.hello()
        clients = [busy_client(served.address, f"c{i}", 2000, ("scripted", "remote")[i % 2]) for i in range(10)]
        assert [said(client) for client in clients] == ["submitted"] * 10
        eventually(lambda: len(served.engine.live) == 10)
        submit(other, group("other", max_tokens=300))
        for client in clients:
            client.kill()
        killed = time.monotonic()
        eventually(lambda: len(served.engine.live) == 1, 10)
        # 0.5 s to notice, 3 s of patience, 0.5 s to look again; the rest is this machine's.
        assert time.monotonic() - killed < 5 + 2
        wire = other.call("status")["wire"]
        assert (wire["clients_gone"], wire["trajectories_cut_off"]) == (10, 10)
        assert len(other.record(30)["segments"][0]["token_ids"]) == 303
        for client in clients:
            client.wait()


def test_34_the_real_engine_has_its_blocks_back(tmp_path: Path) -> None:
    checkpoint = rigs.write_rand(tmp_path / "rand")
    with local_worker(checkpoint, client_timeout=0.3, max_running=8) as served, RawClient(served.address) as client:
        client.hello(timeout=30)
        victim = busy_client(served.address, "victim", 4000)
        assert said(victim) == "submitted"
        eventually(lambda: client.call("status", timeout=30)["engine"]["blocks_used"] > 0, 30)
        victim.kill()
        victim.wait()
        eventually(lambda: client.call("status", timeout=30)["wire"]["clients_gone"] == 1, 30)
        # The last report of the engine may be older than the abort: a request makes it report again.
        submit(client, group(max_tokens=1))
        client.record(30)
        eventually(lambda: client.call("status", timeout=30)["engine"]["blocks_used"] == 0, 30)
        assert client.call("status", timeout=30)["trajectories_running"] == 0


@pytest.mark.parametrize("seconds", [3.0, pytest.param(30.0, marks=pytest.mark.stress)])
def test_34_a_client_that_holds_its_interpreter_lock_keeps_its_work(seconds: float) -> None:
    # Heartbeats that would miss a client in a third of that time, were they answered by its interpreter.
    timeouts = Timeouts(client=0.2, drain=1.0, ack=1.0)
    with checked(TimedEngine(0.01), timeouts=timeouts, heartbeat_timeout=seconds / 3) as served:
        client = busy_client(served.address, "busy", int(seconds * 110), hold=seconds)
        assert said(client) == "submitted"
        assert said(client) == f"length {int(seconds * 110) + 3}"
        assert client.wait() == 0
        assert not served.engine.aborted


@pytest.mark.parametrize("seconds", [3.0, pytest.param(30.0, marks=pytest.mark.stress)])
def test_34_a_client_that_is_stopped_keeps_its_work(seconds: float) -> None:
    with checked(TimedEngine(0.01), timeouts=Timeouts(client=0.2, drain=1.0, ack=1.0)) as served:
        client = busy_client(served.address, "stopped", int(seconds * 50))
        assert said(client) == "submitted"
        client.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        client.send_signal(signal.SIGCONT)
        assert said(client) == f"length {int(seconds * 50) + 3}"
        assert client.wait() == 0


# 35: types that msgpack takes and gives back otherwise.


class NumpyEngine(TimedEngine):
    """Whatever may be a numpy scalar is one."""

    def _completion(self, request: Request, count: int, reason: FinishReason) -> Completion:
        plain = super()._completion(request, count, reason)
        runs: Any = tuple((np.int64(version), np.int32(length)) for version, length in plain.weight_versions)
        return replace(
            plain, weight_versions=runs, kv_version=np.int64(0), cached_tokens=np.int32(0), preemptions=np.int64(0)
        )


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str, msgpack.ExtType)


def test_35_replies_hold_nothing_that_only_python_or_numpy_knows() -> None:
    with checked(NumpyEngine()) as served, RawClient(served.address) as client:
        client.hello()
        client.send("submit", batch_id="b", groups=[group(n=2, metadata={"k": [1, 2.5, True, None, "s"]})])
        kinds = set()
        while "batch_done" not in kinds:
            header = msgpack.unpackb(client.socket.recv_multipart()[0])
            assert plain(header)
            kinds.add(header["type"])
            if header["type"] == "trajectory_done":
                segment = header["record"]["segments"][0]
                assert {value.code for value in segment.values() if isinstance(value, msgpack.ExtType)} == {ARRAY}
                assert header["record"]["metadata"] == {"k": [1, 2.5, True, None, "s"]}
        client.send("ack", trajectory_ids=["g.0", "g.1"])


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ({"type": "cancel", "id": "x", 17: -0.5}, None),
        ({"type": "submit", "id": "x", "batch_id": "b", "groups": [{"metadata": {17: 1.0}}]}, "groups"),
        ({"type": "submit", "id": "x", "batch_id": "b", "groups": [{"sampling": {"bias": {17: 1.0}}}]}, "groups"),
        (
            {"type": "prepare_weights", "id": "x", "update_id": "u", "path": "p", "version": 1, "checksums": {1: "a"}},
            "c",
        ),
    ],
)
def test_35_a_map_with_keys_that_are_no_text_is_refused(header: dict[Any, Any], field: str | None) -> None:
    with checked() as served, RawClient(served.address) as client:
        client.hello()
        client.socket.send(msgpack.packb({"protocol": 1, **header}))
        error = client.wait(lambda message: message["type"] == "error", 10)["error"]
        assert error["code"] == "bad_request"
        assert field is None or error["field"].startswith(field)


def test_35_a_map_with_a_key_twice_is_refused() -> None:
    with checked() as served, RawClient(served.address) as client:
        client.hello()
        pairs = [("type", "ping"), ("id", "x"), ("protocol", 1), ("id", "y")]
        packer = msgpack.Packer()
        client.socket.send(packer.pack_map_header(4) + b"".join(packer.pack(part) for pair in pairs for part in pair))
        assert client.wait(lambda message: message["type"] == "error", 10)["error"]["code"] == "bad_request"


# 38: a ROUTER and an identity it does not know, or knew.


def test_38_a_client_restarted_under_its_old_identity_is_served_at_once() -> None:
    with checked(TimedEngine(0.01)) as served:
        first = RawClient(served.address, identity=b"c1")
        token = first.hello()["session"]
        submit(first, group(max_tokens=30))
        first.close()
        with RawClient(served.address, identity=b"c1") as second:
            assert second.hello(session=token)["resumed"]
            assert second.record()["trajectory_id"] == "g.0"


def test_38_a_second_socket_takes_the_identity_of_one_that_is_still_open() -> None:
    with checked() as served, RawClient(served.address, identity=b"c1") as first:
        first.hello()
        with RawClient(served.address, identity=b"c1") as second:
            assert second.hello(timeout=1.5)["type"] == "welcome"
            submit(second, group())
            assert second.record()["status"] == "truncated"


def test_38_a_reply_to_an_identity_that_never_returns_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with checked(TimedEngine(score_s=0.5), timeouts=Timeouts(client=30, drain=1.0, ack=1.0)) as served:
        client = RawClient(served.address, identity=b"c2")
        client.hello()
        client.send("score", id="score-9", sequences=[np.array([1, 2], np.int32)])
        client.send("prepare_weights", id="prepare-9", update_id="u", path="w", version=1)
        client.call("ping")
        served.call(lambda service: service.sessions.connection(b"c2").calls)
        client.close()
        # The worker has not looked yet; the first thing it wants to say fails.
        time.sleep(0.1)
        served.call(lambda service: service.reply(b"c2", service.pong("late-9")))
        assert served.call(lambda service: service.status("")).wire["undeliverable"] >= 1
        eventually(lambda: "replies that reached nobody" in caplog.text)
        eventually(lambda: not served.engine.live)


# 41: messages before the peer is there.


def test_41_a_client_that_was_there_first_is_answered_once_the_worker_is_up() -> None:
    with worker() as before:
        address = before.address
    with RawClient(address) as client, RawClient(address) as impatient:
        request_id = client.send("hello", client="early", session=None)
        with pytest.raises(TimeoutError):
            impatient.hello(timeout=0.2)
        with checked(address=address):
            assert client.reply(request_id)["type"] == "welcome"


def test_41_a_worker_restarted_under_a_waiting_client_says_who_it_is() -> None:
    with worker(TimedEngine(1.0)) as first:
        address = first.address
        client = RawClient(address)
        one = client.hello()
        submit(client, group())
    # What ran came back when the first worker shut down, or is submitted again.
    with client, checked(TimedEngine(), address=address):
        assert client.record()["finish_reason"] == "abort_shutdown"
        assert client.call("ping")["error"]["code"] == "not_ready"
        two = client.hello(session=one["session"])
        assert not two["resumed"]
        assert two["boot_id"] != one["boot_id"]
        submit(client, group())
        assert client.record()["finish_reason"] == "length"


def test_41_clients_that_connect_in_the_same_millisecond_each_get_their_own() -> None:
    with checked() as served:
        clients = [RawClient(served.address) for _ in range(20)]
        hellos = [client.send("hello", client=str(i), session=None) for i, client in enumerate(clients)]
        tokens = {client.reply(hello)["session"] for client, hello in zip(clients, hellos, strict=True)}
        assert len(tokens) == 20
        for i, client in enumerate(clients):
            client.send("submit", batch_id="b", groups=[group(f"g{i}", max_tokens=i + 1)])
        for i, client in enumerate(clients):
            record = client.record()
            assert record["group_id"] == f"g{i}"
            assert len(record["segments"][0]["token_ids"]) == 3 + i + 1
        for client in clients:
            client.close()


def test_41_a_client_that_joins_after_an_update_learns_the_version_first() -> None:
    with checked() as served, RawClient(served.address) as one:
        one.hello()
        one.call("prepare_weights", update_id="u", path="w", version=3)
        one.call("commit_weights", update_id="u", version=3, mode="abort")
        with RawClient(served.address) as two:
            welcome = two.hello()
            assert (welcome["weight_version"], welcome["weight_digest"]) == (3, "stub:w")


# 52: an update while another one is under way.


@pytest.mark.parametrize("second", [1, 2])
def test_52_the_second_of_two_updates_is_refused_and_the_worker_can_go_on(second: int) -> None:
    with (
        checked(TimedEngine(prepare_s=0.3)) as served,
        RawClient(served.address) as one,
        RawClient(served.address) as two,
        RawClient(served.address) as trainer,
    ):
        for client in (one, two, trainer):
            client.hello()
        first = one.send("prepare_weights", update_id="a", path="wa", version=1)
        time.sleep(0.01)
        error = two.call("prepare_weights", update_id="b", path="wb", version=second)["error"]
        assert (error["code"], error["retryable"]) == ("weights_busy", True)
        submit(trainer, group("during"))
        assert trainer.record()["segments"][0]["weight_versions"].tolist() == [[0, 4]]
        assert one.reply(first)["type"] == "weights_prepared"
        assert one.call("commit_weights", update_id="a", version=1, mode="abort")["type"] == "weights_committed"
        assert two.call("prepare_weights", update_id="b", path="wb", version=second)["type"] == "weights_prepared"
        last = two.call("commit_weights", update_id="b", version=second, mode="abort")
        assert trainer.call("status")["weight_version"] == last["version"] == second
        submit(trainer, group("after"), batch="c")
        assert trainer.record()["segments"][0]["weight_versions"].tolist() == [[second, 4]]


def test_52_an_update_that_fails_leaves_nothing_paused() -> None:
    with checked(TimedEngine(prepare_s=0.1)) as served, RawClient(served.address) as client:
        client.hello()
        for i in range(3):
            failed = client.call("prepare_weights", update_id=f"u{i}", path="bad", version=1)["error"]
            assert failed["code"] == "weights_invalid"
            assert client.call("status")["state"] == "ready"
            submit(client, group(f"g{i}"), batch=f"b{i}")
            assert client.record()["segments"][0]["weight_versions"].tolist() == [[0, 4]]
        assert client.call("prepare_weights", update_id="good", path="w", version=1)["type"] == "weights_prepared"
        assert client.call("commit_weights", update_id="good", version=1, mode="abort")["version"] == 1


# 72: SIGTERM (test_shutdown.py has the rest).


def test_72_a_terminated_worker_leaves_no_socket_file(tmp_path: Path) -> None:
    served = WorkerProcess("tests.rollout.stub_worker", "--seconds-per-token", "0.01", folder=tmp_path, ipc=True)
    try:
        with RawClient(served.wait_ready().address) as client:
            client.hello()
            submit(client, group(max_tokens=20))
            sockets = [path for path in tmp_path.iterdir() if path.is_socket()]
            assert len(sockets) == 1
            served.signal(signal.SIGTERM)
            assert client.record()["finish_reason"] == "length"
            assert served.wait() == 0
        assert not sockets[0].exists()
    finally:
        served.kill()


# 73: a fork after the worker's ZeroMQ context exists.


@pytest.mark.parametrize("place", ["", ",process"], ids=["in the worker", "in a process"])
def test_73_a_tool_in_a_forked_child_harms_nobody(tmp_path: Path, place: str) -> None:
    ways = {"return": 0.0, "sys.exit": 3.0, "os._exit": 4.0, "client": 5.0}
    served = WorkerProcess(
        "tests.rollout.stub_worker", "--env", f"forking=tests.rollout.forking:Forking{place}", folder=tmp_path
    )
    try:
        address = served.wait_ready().address
        with RawClient(address) as client:
            client.hello()
            groups = [
                group(how, environment={"name": "forking", "config": {"how": how, "address": address}}) for how in ways
            ]
            submit(client, *groups)
            records = [client.record(60) for _ in ways]
            exits = {record["group_id"]: record["segments"][0]["turns"][0]["reward"] for record in records}
            assert exits == ways
            submit(client, group("after"), batch="c")
            assert client.record()["finish_reason"] == "length"
        children = psutil.Process(served.process.pid).children(recursive=True)
        assert not place or len(children) > 2, "they ran in processes"
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert "Assertion failed" not in served.log
        assert "Traceback" not in served.log
    finally:
        served.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(served.process.pid, 0)
    eventually(lambda: not any(child.is_running() for child in children))
