from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from protocols.fields import Limits
from protocols.replies import GroupDone
from rollout.service.service import Timeouts
from rollout.wire.outbox import Event
from rollout.wire.sessions import Session, Sessions
from tests.rollout.raw_client import RawClient, group
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.workers import WorkerThread, eventually, on_loop, worker

REMOTE = {"environment": {"name": "remote"}, "budget": {"on_length": "continue"}}


def submit(client: RawClient, *groups: dict[str, Any], batch: str = "b") -> None:
    reply = client.call("submit", batch_id=batch, groups=list(groups))
    assert reply["type"] == "accepted", reply


def drop(client: RawClient, served: WorkerThread) -> None:
    """Close a client's socket and wait until the worker has noticed."""
    before = served.call(lambda service: len(service.sessions.connections))
    client.close()
    eventually(lambda: bool(served.call(lambda service: len(service.sessions.connections)) < before))


def wire(served: WorkerThread) -> dict[str, float]:
    status: dict[str, float] = served.call(lambda service: service.status("")).wire
    return status


# Hello.


@pytest.mark.parametrize("kind", ["ping", "status", "submit", "cancel", "score", "drain"])
def test_everything_but_hello_is_not_ready_before_hello(kind: str) -> None:
    fields: dict[str, Any] = {}
    if kind == "submit":
        fields = {"batch_id": "b", "groups": [group()]}
    if kind == "drain":
        fields = {"timeout_s": 1.0}
    if kind == "score":
        fields = {"sequences": [np.array([1], np.int32)]}
    with worker() as served, RawClient(served.address) as client:
        error = client.call(kind, **fields)["error"]
        assert (error["code"], error["retryable"], error["scope"]) == ("not_ready", True, "session")
        assert "hello" in error["message"]


def test_welcome_says_what_is_served() -> None:
    with worker(limits=Limits(window_bytes=123456)) as served, RawClient(served.address) as client:
        welcome = client.hello()
        assert welcome["boot_id"] == served.service.boot_id
        assert welcome["model"]["vocab_size"] == 1000
        assert welcome["limits"]["window_bytes"] == 123456
        assert welcome["limits"]["max_context"] == welcome["model"]["max_context"] == 16384
        assert {"remote", "scripted"} <= set(welcome["environments"])
        assert (welcome["weight_version"], welcome["weight_digest"]) == (0, "stub:start")
        assert not welcome["resumed"]


def test_every_session_has_a_token_of_its_own_that_nobody_guesses() -> None:
    with worker() as served, RawClient(served.address) as one, RawClient(served.address) as two:
        tokens = {one.hello()["session"], two.hello()["session"], one.hello()["session"]}
        assert len(tokens) == 3
        assert min(map(len, tokens)) == 32


def test_an_unknown_token_opens_a_new_session_and_says_so() -> None:
    with worker() as served, RawClient(served.address) as client:
        welcome = client.hello(session="f" * 32)
        assert not welcome["resumed"]
        assert welcome["session"] != "f" * 32


def test_an_ack_has_no_reply_even_before_hello() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.send("ack", trajectory_ids=["x"])
        assert client.hello()["type"] == "welcome"
        client.send("ack", trajectory_ids=["x"])
        client.call("ping")
        assert client.waiting == []


def test_the_last_ack_of_a_client_that_left_counts() -> None:
    with worker() as served:
        client = RawClient(served.address, identity=b"c")
        client.hello()
        submit(client, group())
        client.record(ack=False)
        served.call(lambda service: service.sessions.gone(b"c"))
        client.send("ack", trajectory_ids=["g.0"])
        eventually(lambda: served.service.runs.results == 0)
        assert client.call("ping")["error"]["code"] == "not_ready"
        client.close()


# Coming back.


def test_a_client_that_comes_back_finds_its_work_and_gets_everything_unacknowledged_again() -> None:
    with worker(TimedEngine(0.005)) as served:
        client = RawClient(served.address)
        token = client.hello()["session"]
        submit(client, group("a", n=2, max_tokens=2), group("b", n=2, max_tokens=60))
        taken = client.record()["trajectory_id"]
        kept = client.record(ack=False)["trajectory_id"]
        drop(client, served)
        with RawClient(served.address) as again:
            welcome = again.hello(session=token)
            assert welcome["resumed"]
            assert welcome["session"] == token
            assert set(welcome["open_trajectories"]) == {kept, "b.0", "b.1"}
            seen = [again.record()["trajectory_id"] for _ in range(3)]
            assert seen[0] == kept
            assert set(seen[1:]) == {"b.0", "b.1"}
            assert taken not in seen
            assert again.event("group_done")["group_id"] == "a"
            assert again.event("batch_done")["counts"] == {"truncated": 4}


def test_a_group_done_that_was_lost_on_the_way_comes_again() -> None:
    with worker() as served:
        client = RawClient(served.address, auto_count=False)
        token = client.hello()["session"]
        submit(client, group())
        client.send("ack", trajectory_ids=[client.record(ack=False)["trajectory_id"]])
        client.event("batch_done")
        client.call("ping")
        drop(client, served)
        with RawClient(served.address) as again:
            assert again.hello(session=token)["open_trajectories"] == []
            assert again.event("group_done")["group_id"] == "g"
            assert again.event("batch_done")["batch_id"] == "b"
            again.call("ping")
            # Counted now, so the worker has nothing left to say.
            assert len(served.call(lambda service: service.sessions.all[0].outbox)) == 0


def test_a_turn_that_waits_for_its_answer_is_asked_again_and_answered_once() -> None:
    with worker() as served:
        client = RawClient(served.address)
        token = client.hello()["session"]
        submit(client, group(max_tokens=2, **REMOTE))
        first = client.event("turn_done")
        drop(client, served)
        with RawClient(served.address) as again:
            again.hello(session=token)
            turn = again.event("turn_done")
            np.testing.assert_array_equal(turn["token_ids"], first["token_ids"])
            answer = {
                "trajectory_id": "g.0",
                "turn": 0,
                "expected_len": turn["total_len"],
                "observation": np.array([9], np.int32),
            }
            assert again.call("continue", **answer)["type"] == "ok"
            second = again.event("turn_done")
            assert second["turn"]["index"] == 1
            assert again.call("continue", **answer)["type"] == "ok"
            assert again.call("continue", **answer | {"observation": np.array([8], np.int32)})["error"]["code"] == (
                "prefix_mismatch"
            )
            last = {"trajectory_id": "g.0", "turn": 1, "expected_len": second["total_len"], "done": True, "reward": 1.0}
            assert again.call("continue", **last)["detail"] == {"ended": 0}
            record = again.record(ack=False)
            assert (record["status"], record["reward"]) == ("completed", 1.0)
            assert again.call("continue", **last)["detail"] == {"ended": 1}
            again.send("ack", trajectory_ids=["g.0"])
            assert again.call("continue", **last)["error"]["code"] == "unknown_trajectory"
            assert not [message for message in again.waiting if message["type"] == "turn_done"]


@pytest.mark.parametrize(
    "wrong", [{"turn": 1}, {"expected_len": 4}, {"observation": np.array([1000], np.int32)}, {"trajectory_id": "x"}]
)
def test_an_answer_that_does_not_fit_is_refused_and_the_turn_still_waits(wrong: dict[str, Any]) -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(max_tokens=2, **REMOTE))
        turn = client.event("turn_done")
        answer = {"trajectory_id": "g.0", "turn": 0, "expected_len": turn["total_len"], "glue": np.array([1], np.int32)}
        code = client.call("continue", **answer | wrong)["error"]["code"]
        assert code in ("prefix_mismatch", "bad_request", "unknown_trajectory")
        assert client.call("continue", **answer)["type"] == "ok"
        assert client.event("turn_done")["total_len"] == turn["total_len"] + 1 + 2


def test_results_go_to_the_newest_connection_of_a_session() -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as old, RawClient(served.address) as new:
        token = old.hello()["session"]
        submit(old, group(max_tokens=20))
        assert new.hello(session=token)["resumed"]
        assert new.record()["trajectory_id"] == "g.0"
        assert old.call("ping")["error"]["code"] == "not_ready"
        assert not [message for message in old.waiting if message["type"] == "trajectory_done"]


# Going away.


def test_the_work_of_a_client_that_is_gone_is_cancelled_and_others_do_not_notice() -> None:
    timeouts = Timeouts(client=0.5, drain=1.0, ack=1.0)
    with worker(TimedEngine(0.01), timeouts=timeouts) as served, RawClient(served.address) as other:
        other.hello()
        client = RawClient(served.address)
        token = client.hello()["session"]
        submit(client, group("short", max_tokens=1), group("long", n=3, max_tokens=10_000))
        client.event("trajectory_done")
        submit(other, group("other", max_tokens=200))
        drop(client, served)
        eventually(lambda: len(served.engine.live) == 1, 5)
        assert {name.split("/")[1] for name in served.engine.aborted} == {"long.0", "long.1", "long.2"}
        eventually(lambda: served.service.runs.admission.running == 1)
        status = other.call("status")
        assert status["wire"]["clients_gone"] == 1
        assert status["wire"]["trajectories_cut_off"] == 3
        assert status["wire"]["results_dropped"] == 1
        assert status["sessions"] == 1
        assert len(other.record()["segments"][0]["token_ids"]) == 203
        with RawClient(served.address) as again:
            assert not again.hello(session=token)["resumed"]


def test_a_client_that_comes_back_in_time_keeps_its_work() -> None:
    with worker(TimedEngine(0.01), timeouts=Timeouts(client=30.0, drain=1.0, ack=1.0)) as served:
        client = RawClient(served.address)
        token = client.hello()["session"]
        submit(client, group(max_tokens=200))
        drop(client, served)
        eventually(lambda: served.service.sessions.all[0].gone_since is not None)
        with RawClient(served.address) as again:
            assert again.hello(session=token)["resumed"]
            assert len(again.record()["segments"][0]["token_ids"]) == 203
        assert not served.engine.aborted


def test_a_connected_client_may_be_silent_for_longer_than_the_timeout() -> None:
    with worker(TimedEngine(0.01), timeouts=Timeouts(client=0.3, drain=1.0, ack=1.0)) as served:
        with RawClient(served.address) as client:
            client.hello()
            submit(client, group(max_tokens=250))
            time.sleep(2.5)
            assert len(client.record()["segments"][0]["token_ids"]) == 253
            assert client.pings >= 1
        assert not served.engine.aborted


def test_a_new_hello_without_token_leaves_the_old_session_to_time_out() -> None:
    timeouts = Timeouts(client=0.3, drain=1.0, ack=1.0)
    with worker(TimedEngine(0.01), timeouts=timeouts) as served, RawClient(served.address) as client:
        first = client.hello()["session"]
        submit(client, group(max_tokens=10_000))
        assert client.hello()["session"] != first
        eventually(lambda: bool(served.engine.aborted), 5)
        assert client.call("status")["sessions"] == 1


def test_a_reply_for_nobody_is_counted_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with worker() as served:
        served.call(lambda service: service.reply(b"nobody", service.pong("request-7")))
        assert wire(served)["undeliverable"] == 1
    assert "request-7" in caplog.text


# Without a socket.


class Peers:
    """Sessions over peers that are up or down, and a clock of our own."""

    def __init__(self, client_timeout: float = 3.0) -> None:
        self.up: set[bytes] = set()
        self.sent: list[bytes] = []
        self.expired: list[Session] = []
        self.sessions = Sessions(
            self.send, limits=Limits(), client_timeout=client_timeout, on_expired=self.expired.append
        )

    def send(self, peer: bytes, frames: list[bytes | memoryview]) -> bool:
        assert frames
        if peer not in self.up:
            self.sessions.gone(peer)
            return False
        self.sent.append(peer)
        return True

    def probe(self, peer: bytes) -> bool:
        return peer in self.up


@on_loop
async def test_the_clock_of_a_session_runs_while_its_peer_is_down_only() -> None:
    peers = Peers()
    peers.up.add(b"a")
    connection, _ = peers.sessions.greet(b"a", "client", None)
    for now in range(1, 100):
        peers.sessions.check(float(now), peers.probe)
    assert peers.sessions.connection(b"a") is connection
    peers.up.clear()
    for now in (100.0, 101.0, 102.0, 102.9):
        peers.sessions.check(now, peers.probe)
    assert peers.sessions.connection(b"a") is None
    assert connection.sender.closed
    assert not peers.expired
    peers.sessions.check(103.0, peers.probe)
    assert peers.expired == [connection.session]
    assert len(peers.sessions) == 0


@on_loop
async def test_a_peer_that_is_up_again_stops_the_clock_but_needs_a_hello() -> None:
    peers = Peers()
    peers.up.add(b"a")
    connection, _ = peers.sessions.greet(b"a", "client", None)
    peers.up.clear()
    peers.sessions.check(1.0, peers.probe)
    peers.up.add(b"a")
    for now in range(2, 50):
        peers.sessions.check(float(now), peers.probe)
    assert not peers.expired
    assert peers.sessions.connection(b"a") is None
    again, resumed = peers.sessions.greet(b"a", "client", connection.session.token)
    assert resumed
    assert again.session is connection.session


@on_loop
async def test_an_event_posted_while_nobody_is_there_waits_in_the_outbox() -> None:
    peers = Peers()
    peers.up.add(b"a")
    connection, _ = peers.sessions.greet(b"a", "client", None)
    session = connection.session
    peers.sessions.gone(b"a")
    message = GroupDone(id="s", batch_id="b", group_id="g", counts={}, complete=True)
    session.post(Event(("group", "b", "g"), lambda: message, settled=lambda: True))
    assert session.connection is None
    assert len(session.outbox) == 1
    again, _ = peers.sessions.greet(b"b", "client", session.token)
    peers.up.add(b"b")
    peers.sessions.redeliver(again)
    assert again.sender.depth == 1
