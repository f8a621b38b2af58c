from __future__ import annotations

import random
import socket
import time
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from engine.handle import Submit
from protocols.fields import Limits, Record
from protocols.replies import Scored
from protocols.requests import Score
from rollout.generation.pace import FIRST
from rollout.service.score import Scorer
from rollout.service.service import Service
from rollout.trajectory.trajectory import Trajectory
from tests.rollout.raw_client import RawClient, group, pack
from tests.rollout.timed_engine import TimedEngine, reply_ids, reply_logprobs
from tests.rollout.workers import WorkerProcess, eventually, served, worker


def submit(client: RawClient, *groups: dict[str, Any], batch: str = "b") -> dict[str, Any]:
    return client.call("submit", batch_id=batch, groups=list(groups))


def works(client: RawClient, name: str = "fine") -> bool:
    """The smoke request of every check: known ids come back."""
    reply = submit(client, group(name, prompt=[5, 6, 7], max_tokens=4), batch=f"batch of {name}")
    assert reply["type"] == "accepted", reply
    record = client.wait(lambda m: m["type"] == "trajectory_done" and m["record"]["group_id"] == name, 30)["record"]
    client.send("ack", trajectory_ids=[f"{name}.0"], received_bytes=client.received_bytes)
    return bool(record["segments"][0]["token_ids"].tolist() == [5, 6, 7, *reply_ids(3, 4)])


def test_trajectories_that_start_together_reach_the_engine_together() -> None:
    with worker(TimedEngine(seconds_per_token=60.0)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, *(group(f"g{i}", n=2, max_tokens=1) for i in range(FIRST // 2)))
        eventually(lambda: len(served.engine.live) == FIRST)
        sent = [command for command in served.engine.seen if isinstance(command, Submit)]
        assert [len(command.requests) for command in sent] == [FIRST]


def test_one_turn_there_and_back() -> None:
    with worker() as served, RawClient(served.address) as client:
        welcome = client.hello()
        assert welcome["type"] == "welcome"
        accepted = submit(client, group(prompt=[5, 6, 7], max_tokens=4))
        assert (accepted["type"], accepted["trajectories"], accepted["known"]) == ("accepted", 1, 0)
        record = client.record()
        segment = record["segments"][0]
        assert record["status"] == "truncated"
        np.testing.assert_array_equal(segment["token_ids"], [5, 6, 7, *reply_ids(3, 4)])
        np.testing.assert_array_equal(segment["logprobs"], np.r_[np.zeros(3), reply_logprobs(4)].astype(np.float32))
        np.testing.assert_array_equal(segment["loss_mask"], [0, 0, 0, 1, 1, 1, 1])
        assert client.event("group_done")["complete"]
        assert client.event("batch_done")["counts"] == {"truncated": 1}


# What cannot be read.


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([msgpack.packb({"type": "ping", "id": "x", "protocol": 2})], "protocol"),
        ([msgpack.packb({"type": "nonsense", "id": "x", "protocol": 1})], "type"),
        ([msgpack.packb({"type": "welcome", "id": "x", "protocol": 1})], "type"),
        ([msgpack.packb({"type": "ping", "id": "x", "protocol": 1, "extra": 1})], "extra"),
        ([msgpack.packb({"type": "cancel", "id": "x", "protocol": 1, "trajectory_ids": [1]})], "trajectory_ids[0]"),
        ([msgpack.packb({"type": "ping", "id": "x", "protocol": 1}), b"a blob of nobody's"], None),
    ],
)
def test_what_cannot_be_read_costs_one_error_under_its_own_id(frames: list[bytes], field: str | None) -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        client.socket.send_multipart(frames)
        error = client.reply("x")["error"]
        assert (error["code"], error["field"]) == ("bad_request", field)
        assert works(client)


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"], [b"\x00" * 100], [msgpack.packb([1, 2])], [b"", b"", b""]])
def test_what_has_no_id_is_answered_on_a_greeted_connection_and_dropped_on_another(frames: list[bytes]) -> None:
    with worker() as served, RawClient(served.address) as client:
        client.socket.send_multipart(frames)
        client.hello()
        client.socket.send_multipart(frames)
        assert client.reply("")["error"]["code"] == "bad_request"
        assert client.call("status")["wire"]["unreadable"] == 2
        assert works(client)


def test_a_frame_above_the_limit_costs_its_sender_the_connection_and_nobody_else() -> None:
    limits = Limits(max_frame=100_000)
    with worker(limits=limits) as served, RawClient(served.address) as bad, RawClient(served.address) as good:
        bad.hello()
        good.hello()
        bad.socket.send(b"x" * 200_000)
        eventually(lambda: bool(served.call(lambda service: len(service.sessions.connections)) == 1))
        assert works(good)


def test_bytes_that_are_not_zeromq_disturb_nobody() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        host, port = served.address.removeprefix("tcp://").split(":")
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)), b""):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(noise)
        assert works(client)


def test_a_fault_of_ours_is_internal_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Service, request_id: str) -> None:
        raise ZeroDivisionError(request_id)

    with worker() as served, RawClient(served.address) as client:
        client.hello()
        monkeypatch.setattr(Service, "status", broken)
        error = client.call("status", id="s7")["error"]
        assert error["code"] == "internal"
        assert "ZeroDivisionError" in error["message"]
        assert works(client)
    assert "'s7' failed" in caplog.text


def test_a_record_that_cannot_be_sent_comes_as_one_that_failed_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Trajectory.to_record

    def spoilt(self: Trajectory, *args: Any, **kwargs: Any) -> Record:
        record = made(self, *args, **kwargs)
        bad = record.trajectory_id == "g.1" and record.status != "failed"
        return record.model_copy(update={"purpose": object()}) if bad else record

    monkeypatch.setattr(Trajectory, "to_record", spoilt)
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        client.call("submit", batch_id="b", groups=[group("g", n=3, metadata={"a": 1})])
        records = {record["trajectory_id"]: record for record in (client.record() for _ in range(3))}
        assert [records[f"g.{i}"]["status"] for i in range(3)] == ["truncated", "failed", "truncated"]
        error = records["g.1"]["error"]
        assert (error["code"], error["scope"]) == ("internal", "trajectory")
        assert error["message"] == "its record cannot be sent: TypeError: object cannot be sent"
        assert (records["g.1"]["metadata"], records["g.1"]["sample_index"]) == ({"a": 1}, 1)
        assert client.event("batch_done")["batch_id"] == "b"
        eventually(lambda: bool(served.call(lambda service: service.runs.results) == 0))
        assert works(client)


def test_scores_that_cannot_be_sent_are_an_error_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scored(_: Scorer, request: Score) -> Scored:
        return Scored.model_construct(id=request.id, weight_version=0, logprobs={"raw": object()})

    monkeypatch.setattr(Scorer, "score", scored)
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        error = client.call("score", id="s1", sequences=[np.arange(3, dtype=np.int32)])["error"]
        assert (error["code"], error["message"]) == ("internal", "TypeError: object cannot be sent")
        assert works(client)


def valid_messages() -> list[list[bytes]]:
    """One of each request that leaves the worker as it was."""
    prompt = np.arange(20, dtype=np.int32)
    script = [{"glue": prompt[:2], "observation": prompt[:3], "max_tokens": 2}]
    rich = group(
        "rich",
        n=3,
        environment={"script": script},
        metadata={"a": [1, {"b": None}]},
        sampling={"bias_ids": prompt[:2], "bias_values": np.ones(2, np.float32), "temperature": 0.5},
    )
    sequences = {"sequences": [prompt, prompt[:5]]}
    messages: list[dict[str, Any]] = [
        {"type": "hello", "client": "fuzz", "session": None},
        {"type": "submit", "batch_id": "fuzz", "groups": [rich, group("plain")]},
        {"type": "continue", "trajectory_id": "rich.0", "turn": 0, "expected_len": 22, "glue": prompt[:2]},
        {"type": "cancel", "trajectory_ids": ["rich.0"], "batch_ids": ["fuzz"]},
        {"type": "ack", "trajectory_ids": ["rich.0"], "received_bytes": 100},
        {"type": "prepare_weights", "update_id": "u", "path": "bad", "version": 1, "checksums": {"a": "b"}},
        {"type": "commit_weights", "update_id": "u", "version": 1, "mode": "abort"},
        {"type": "abort_weights", "update_id": "u"},
        {"type": "sleep", "level": 1},
        {"type": "score", **sequences, "sampled": [np.zeros(20, np.uint8), np.zeros(5, np.uint8)]},
        {"type": "status"},
        {"type": "ping"},
    ]
    return [pack({"id": "fuzz", "protocol": 1, **message}) for message in messages]


def mutate(frames: list[bytes], chance: random.Random) -> list[bytes]:
    frames = [*frames]
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(frames))
        data = bytearray(frames[at])
        where = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0 if data:
                data[where % len(data)] ^= 1 << chance.randrange(8)
            case 1:
                data = data[:where]
            case 2:
                data[where:where] = chance.randbytes(chance.randint(1, 8))
            case 3 if data:
                data[where % len(data)] = chance.choice((0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xC7, 0xDD, 0xDF, 0xFF))
            case 4:
                frames.insert(at, bytes(data))
            case 5 if len(frames) > 1:
                del frames[at]
                continue
            case _:
                data = bytearray(chance.randbytes(chance.randint(0, 64)))
        frames[at] = bytes(data)
    return frames


def fuzz(count: int, seed: int) -> None:
    chance = random.Random(seed)
    valid = valid_messages()
    with worker() as served, RawClient(served.address) as hostile, RawClient(served.address) as good:
        good.hello()
        hostile.hello()
        for i in range(count):
            hostile.socket.send_multipart(mutate(chance.choice(valid), chance))
            while hostile.socket.poll(0):
                hostile.socket.recv_multipart()
            if i % 1000 == 999:
                assert works(good, f"good {i}")
        # It may have said a valid hello, and has lost count of what it received: from here on it behaves.
        hostile.hello()
        assert works(hostile)
        assert good.call("status")["wire"]["unreadable"] > count / 2
        assert served.call(lambda service: service.state) == "ready"


def test_5000_mutated_messages_cost_an_error_each_at_most() -> None:
    fuzz(5_000, seed=1)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_100000_mutated_messages_cost_an_error_each_at_most() -> None:
    fuzz(100_000, seed=2)


# Control.


def test_ping_and_status() -> None:
    with worker(TimedEngine(0.05), at_once=1) as served, RawClient(served.address) as client:
        client.hello()
        pong = client.call("ping")
        assert (pong["type"], pong["boot_id"], pong["weight_version"]) == ("pong", served.service.boot_id, 0)
        submit(client, group(n=3, max_tokens=1000))
        eventually(lambda: len(served.engine.live) == 1)
        status = client.call("status")
        assert (status["state"], status["sessions"]) == ("ready", 1)
        assert (status["trajectories_running"], status["trajectories_waiting"]) == (1, 2)
        assert status["wire"]["rx_bytes"] > 0
        assert status["wire"]["tx_bytes"] > 0
        assert "running" in status["engine"]


def test_pause_holds_everything_and_resume_lets_it_go_on() -> None:
    with worker(TimedEngine(0.001)) as served, RawClient(served.address) as client:
        client.hello()
        assert client.call("pause")["type"] == "ok"
        assert client.call("status")["state"] == "paused"
        assert submit(client, group())["type"] == "accepted"
        error = client.call("score", sequences=[np.array([1, 2], np.int32)])["error"]
        assert (error["code"], error["retryable"]) == ("paused", True)
        assert client.nothing(0.1)
        assert client.call("resume")["type"] == "ok"
        assert client.record()["status"] == "truncated"


def test_drain_answers_when_nothing_runs_and_resume_opens_again() -> None:
    with worker(TimedEngine(0.01), at_once=1) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(n=2, max_tokens=20))
        drain = client.send("drain", timeout_s=20.0)
        assert submit(client, group("late"))["error"]["code"] == "shutting_down"
        assert client.call("status")["state"] == "draining"
        assert client.reply(drain)["detail"] == {"running": 0, "waiting": 0}
        assert [client.record()["status"] for _ in range(2)] == ["truncated"] * 2
        client.call("resume")
        assert works(client)


def test_drain_says_what_still_runs_when_its_time_is_up() -> None:
    with worker(TimedEngine(0.01), at_once=1) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(n=3, max_tokens=1000))
        eventually(lambda: len(served.engine.live) == 1)
        assert client.call("drain", timeout_s=0.1)["detail"] == {"running": 1, "waiting": 2}


@pytest.mark.parametrize("kind", ["sleep", "wake"])
def test_what_is_not_built_is_refused_by_its_capability(kind: str) -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        error = client.call(kind)["error"]
        assert error["code"] == "bad_request"
        assert "'sleep'" in error["message"]


# Score.


def test_score_gives_a_logprob_for_every_token_but_the_first() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        sequences = [np.arange(n, dtype=np.int32) % 1000 for n in (1, 5, 3000)]
        scored = client.call("score", sequences=sequences, sampling={"logprobs": ["raw", "processed"]})
        assert set(scored["logprobs"]) == {"raw", "processed"}
        for ids, logprobs in zip(sequences, scored["logprobs"]["raw"], strict=True):
            assert logprobs.dtype == np.float32
            assert np.isnan(logprobs[0])
            assert len(logprobs) == len(ids)
            assert np.isfinite(logprobs[1:]).all()


def test_a_connection_has_only_so_many_requests_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.service.handlers.CALLS", 2)
    ids = [np.array([1, 2, 3], np.int32)]
    with worker(TimedEngine(score_s=0.3)) as served, RawClient(served.address) as client:
        client.hello()
        under_way = [client.send("score", sequences=ids) for _ in range(2)]
        for refused in (client.call("score", sequences=ids), client.call("drain", timeout_s=0.1)):
            assert (refused["error"]["code"], refused["error"]["retryable"]) == ("overloaded", True)
        assert client.call("ping")["type"] == "pong"
        assert [client.reply(name)["type"] for name in under_way] == ["scored"] * 2
        assert client.call("score", sequences=ids)["type"] == "scored"


def test_a_score_too_large_for_one_packet_comes_in_chunks() -> None:
    with worker(limits=Limits(chunk_bytes=1000, window_bytes=4000)) as served, RawClient(served.address) as client:
        client.hello()
        ids = np.zeros(10_000, np.int32)
        scored = client.call("score", sequences=[ids, ids])
        assert [len(logprobs) for logprobs in scored["logprobs"]["processed"]] == [10_000, 10_000]


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"sequences": [np.array([1], np.int32), np.array([1000], np.int32)]}, "bad_request", "sequences[1]"),
        ({"sequences": [np.zeros(65, np.int32)]}, "prompt_too_long", "sequences[0]"),
        ({"sequences": [np.zeros(0, np.int32)]}, "bad_request", "sequences[0]"),
        ({"sequences": []}, "bad_request", "sequences"),
        (
            {"sequences": [np.zeros(2, np.int32)], "sampling": {"stop_ids": [1000]}},
            "bad_request",
            "sampling.stop_ids",
        ),
    ],
)
def test_a_score_that_cannot_be_is_refused_by_name(fields: dict[str, Any], code: str, field: str) -> None:
    with worker(what=served(max_context=64)) as worker_, RawClient(worker_.address) as client:
        client.hello()
        error = client.call("score", **fields)["error"]
        assert (error["code"], error["field"]) == (code, field)


def test_a_score_whose_reply_no_client_could_take_is_refused_before_it_is_computed() -> None:
    """Three modes are three times the request: a reply above max_message would break the connection every time."""
    with worker(limits=Limits(max_message=100_000)) as served, RawClient(served.address) as client:
        client.hello()
        ids = np.zeros(10_000, np.int32)
        modes = ("processed", "temperature", "raw")
        error = client.call("score", sequences=[ids], sampling={"logprobs": modes})["error"]
        assert (error["code"], error["field"]) == ("bad_request", "sequences")
        assert "score fewer" in error["message"]
        scored = client.call("score", sequences=[ids], sampling={"logprobs": modes[:1]})
        assert len(scored["logprobs"]["processed"][0]) == 10_000


def test_a_score_that_a_commit_comes_between_is_of_one_version() -> None:
    with worker(TimedEngine(score_s=0.3)) as served, RawClient(served.address) as client:
        client.hello()
        client.call("prepare_weights", update_id="u", path="w", version=1)
        score = client.send("score", sequences=[np.array([1, 2], np.int32)] * 3)
        eventually(lambda: len(served.engine.live) == 3)
        commit = client.send("commit_weights", update_id="u", version=1, mode="abort")
        assert client.reply(commit)["type"] == "weights_committed"
        scored = client.reply(score)
        assert scored["weight_version"] == 1
        assert all(np.isfinite(logprobs[1:]).all() for logprobs in scored["logprobs"]["processed"])


def test_a_score_whose_client_leaves_is_aborted() -> None:
    with worker(TimedEngine(score_s=100.0)) as served:
        with RawClient(served.address) as client:
            client.hello()
            client.send("score", sequences=[np.array([1, 2], np.int32)])
            eventually(lambda: len(served.engine.live) == 1)
        eventually(lambda: not served.engine.live, 5)


# The engine's death.


def test_a_dead_engine_gives_work_back_as_failed_and_ends_the_worker() -> None:
    with worker(TimedEngine(0.05)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(n=2, max_tokens=1000))
        eventually(lambda: len(served.engine.live) == 2)
        served.engine.die()
        for _ in range(2):
            record = client.record()
            assert (record["status"], record["error"]["code"]) == ("failed", "engine_dead")
        served.join()
        assert served.alive is False


# Bulk and control together.


def slow_reader(client: RawClient, total: int, rate: float) -> list[tuple[int, float]]:
    """Read results of `total` bytes at `rate` bytes/s, pinging; per ping the bulk that came before its answer."""
    per_record = 2048 * 522
    count = total // per_record + 1
    submit(client, group(n=count, prompt=[1], max_tokens=2047, sampling={"top_logprobs": 64}))
    pings: list[tuple[int, float]] = []
    asked: tuple[str, int, float] | None = None
    began, done = time.monotonic(), 0
    while done < count:
        if asked is None:
            asked = client.send("ping"), client.received_bytes, time.monotonic()
        message = client.receive(30)
        if message is not None and message["id"] == asked[0] and message["type"] == "pong":
            pings.append((client.received_bytes - asked[1], time.monotonic() - asked[2]))
            asked = None
        elif message is not None and message["type"] == "trajectory_done":
            done += 1
            client.send("ack", trajectory_ids=[message["record"]["trajectory_id"]])
        time.sleep(max(0.0, began + client.received_bytes / rate - time.monotonic()))
    assert client.received_bytes > total
    return pings


def test_a_ping_waits_behind_no_more_than_the_window() -> None:
    limits = Limits()
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        pings = slow_reader(client, 40 * 2**20, 100 * 2**20)
        assert len(pings) >= 5
        # What is in the window, and the one packet that may have gone over it.
        assert max(bulk for bulk, _ in pings) <= limits.window_bytes + limits.chunk_bytes + 4096


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_a_ping_is_answered_in_100_ms_while_a_gigabyte_is_on_its_way(tmp_path: Path) -> None:
    process = WorkerProcess("tests.rollout.stub_worker", folder=tmp_path)
    try:
        with RawClient(process.wait_ready().address) as client:
            client.hello()
            pings = slow_reader(client, 2**30, 100 * 2**20)
    finally:
        process.kill()
    assert max(seconds for _, seconds in pings) < 0.1


def test_a_client_that_counts_nothing_gets_results_below_the_window_by_its_acks() -> None:
    with worker(limits=Limits(window_bytes=20_000)) as served, RawClient(served.address, auto_count=False) as client:
        client.hello()
        submit(client, group(n=40, max_tokens=300))
        for _ in range(40):
            name = client.event("trajectory_done")["record"]["trajectory_id"]
            client.send("ack", trajectory_ids=[name])
        assert works(client)


def test_a_result_larger_than_the_window_comes_whole() -> None:
    limits = Limits(window_bytes=20_000, chunk_bytes=8_000)
    with worker(limits=limits) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(prompt=[1], max_tokens=10_000))
        np.testing.assert_array_equal(client.record()["segments"][0]["token_ids"][1:], reply_ids(1, 10_000))
