from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocols.fields import Limits
from tests.rollout.raw_client import RawClient, group
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.workers import WorkerThread, eventually, served, worker

SLOW = 0.05
"""Seconds per token of an engine that a test wants to catch in the act."""


def submit(client: RawClient, *groups: dict[str, Any], batch: str = "b", **fields: Any) -> dict[str, Any]:
    return client.call("submit", batch_id=batch, groups=list(groups), **fields)


def refusal(reply: dict[str, Any]) -> tuple[str, str]:
    assert reply["type"] == "error", reply
    return reply["error"]["code"], reply["error"]["field"]


def untouched(served: WorkerThread) -> bool:
    """Does the worker hold nothing of anybody?"""
    runs = served.service.runs
    admission = runs.admission
    return (
        admission.waiting == admission.running == admission.reserved_bytes == 0
        and admission.kept == admission.kept_bytes == runs.results == 0
        and not served.engine.live
    )


# Results, groups, batches.


def test_results_come_as_they_end_and_groups_and_batches_after_their_last() -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group("slow", n=2, max_tokens=30), group("fast", n=2, max_tokens=5))
        order = []
        while "batch_done" not in order:
            message = client.wait(lambda m: m["type"].endswith("_done"), 10)
            name = message["type"]
            order.append(message["record"]["group_id"] if name == "trajectory_done" else message.get("group_id", name))
        assert order == ["fast", "fast", "fast", "slow", "slow", "slow", "batch_done"]


def test_group_done_counts_and_says_whether_the_group_is_complete() -> None:
    with worker(TimedEngine(SLOW)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group("g", n=3, max_tokens=100))
        eventually(lambda: len(served.engine.live) == 3)
        client.call("cancel", trajectory_ids=["g.1"])
        assert client.record()["finish_reason"] == "abort_client"
        client.call("cancel", group_ids=["g"])
        done = client.event("group_done")
        assert done["counts"] == {"aborted": 3}
        assert not done["complete"]
        assert client.event("batch_done")["counts"] == {"aborted": 3}


def test_events_carry_the_id_of_the_submit_they_belong_to() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        client.call("submit", id="first", batch_id="b", groups=[group()])
        assert client.event("trajectory_done")["id"] == "first"
        assert client.event("group_done")["id"] == "first"
        assert client.event("batch_done")["id"] == "first"


def test_samples_of_a_group_share_a_drawn_seed_and_differ_in_their_index() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(n=4))
        records = [client.record() for _ in range(4)]
        assert len({record["sampling"]["seed"] for record in records}) == 1
        assert records[0]["sampling"]["seed"] is not None
        assert sorted(record["sample_index"] for record in records) == [0, 1, 2, 3]


# Ids.


def test_a_repeat_with_equal_content_is_accepted_again_and_runs_once() -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as client:
        client.hello()
        assert submit(client, group(n=2))["known"] == 0
        again = submit(client, group(n=2))
        assert (again["type"], again["trajectories"], again["known"]) == ("accepted", 2, 2)
        names = {client.record()["trajectory_id"] for _ in range(2)}
        assert names == {"g.0", "g.1"}
        client.event("batch_done")
        assert sum(len(getattr(command, "requests", ())) for command in served.engine.seen) == 2


def test_a_part_of_a_group_may_be_repeated_with_its_sample_indices() -> None:
    with worker(TimedEngine(0.02)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(n=3))
        part = group() | {"trajectory_ids": ["g.2"], "sample_indices": [2]}
        assert submit(client, part)["known"] == 1
        wrong = group() | {"trajectory_ids": ["g.2"], "sample_indices": [1]}
        assert refusal(submit(client, wrong)) == ("duplicate", "groups[0].trajectory_ids[0]")


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": np.array([1, 2, 4], np.int32)},
        {"sampling": {"max_tokens": 41}},
        {"metadata": {"a": 1}},
        {"budget": {"max_turns": 1}},
    ],
)
def test_a_repeat_with_other_content_is_a_duplicate_and_harms_nobody(other: dict[str, Any]) -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(max_tokens=20))
        fresh = group("new") | {"trajectory_ids": ["n.0"]}
        code, field = refusal(submit(client, fresh, group(max_tokens=20) | other))
        assert (code, field) == ("duplicate", "groups[1].id")
        # The same trajectory under another group or batch is other content too.
        assert refusal(submit(client, group(max_tokens=20), batch="c"))[0] == "duplicate"
        renamed = group("h", max_tokens=20) | {"trajectory_ids": ["g.0"]}
        assert refusal(submit(client, renamed)) == ("duplicate", "groups[0].trajectory_ids[0]")
        assert len(client.record()["segments"][0]["token_ids"]) == 23
        assert client.nothing(0.1) or client.event("batch_done")
        assert "n.0" not in served.call(lambda service: service.sessions.all[0].trajectories)


def test_an_id_is_free_once_its_result_is_acknowledged() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group())
        client.record(ack=False)
        assert refusal(submit(client, group(max_tokens=7)))[0] == "duplicate"
        client.send("ack", trajectory_ids=["g.0"])
        assert submit(client, group(max_tokens=7))["known"] == 0
        assert len(client.record()["segments"][0]["token_ids"]) == 10


def test_a_repeat_brings_a_result_again_that_was_sent_and_not_acknowledged() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group())
        first = client.record(ack=False)
        assert submit(client, group())["known"] == 1
        second = client.record()
        np.testing.assert_array_equal(first["segments"][0]["token_ids"], second["segments"][0]["token_ids"])


def test_ids_belong_to_a_session() -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as one, RawClient(served.address) as two:
        one.hello()
        two.hello()
        submit(one, group(max_tokens=4))
        submit(two, group(max_tokens=8))
        assert len(one.record()["segments"][0]["token_ids"]) == 7
        assert len(two.record()["segments"][0]["token_ids"]) == 11


def test_acks_of_unknown_and_running_trajectories_are_ignored() -> None:
    with worker(TimedEngine(0.01)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(max_tokens=20))
        client.send("ack", trajectory_ids=["g.0", "nobody"])
        assert client.record()["status"] == "truncated"
        eventually(lambda: untouched(served))


# Refusals: all or nothing, by name.


@pytest.mark.parametrize(
    ("bad", "code", "field"),
    [
        ({"prompt": np.arange(64, dtype=np.int32)}, "prompt_too_long", "prompt"),
        ({"prompt": np.arange(1000, dtype=np.int32)}, "prompt_too_long", "prompt"),
        ({"prompt": np.array([1, 1000], np.int32)}, "bad_request", "prompt"),
        ({"prompt": np.array([-1], np.int32)}, "bad_request", "prompt"),
        ({"prompt": np.array([], np.int32)}, "bad_request", "prompt"),
        ({"environment": {"name": "nobody"}}, "bad_request", "environment.name"),
        (
            {
                "environment": {
                    "script": [{"observation": np.array([3], np.int32)}, {"glue": np.array([2000], np.int32)}]
                }
            },
            "bad_request",
            "environment.script[1].glue",
        ),
        ({"sampling": {"allowed_ids": np.array([5, 1000], np.int32)}}, "bad_request", "sampling.allowed_ids"),
        ({"sampling": {"allowed_ids": np.array([], np.int32)}}, "bad_request", "sampling.allowed_ids"),
        (
            {"sampling": {"bias_ids": np.array([1, 1], np.int32), "bias_values": np.array([1, 2], np.float32)}},
            "bad_request",
            "sampling.bias_ids",
        ),
        ({"sampling": {"stop_ids": [1000]}}, "bad_request", "sampling.stop_ids"),
        ({"sampling": {"stop": ["x"]}}, "bad_request", "sampling.stop"),
        ({"sampling": {"max_tokens": 0}}, "bad_request", "sampling.max_tokens"),
        ({"sampling": {"max_tokens": -1}}, "bad_request", "sampling.max_tokens"),
        ({"budget": {"max_total_tokens": 3}}, "bad_request", "budget.max_total_tokens"),
        ({"sampling": {"temperature": float("nan")}}, "bad_request", "sampling.temperature"),
        ({"surprise": 1}, "bad_request", "surprise"),
    ],
)
def test_one_bad_group_refuses_the_whole_submit_by_name(bad: dict[str, Any], code: str, field: str) -> None:
    with worker(what=served(max_context=64)) as worker_, RawClient(worker_.address) as client:
        client.hello()
        assert refusal(submit(client, group("fine"), group("bad", max_tokens=None) | bad)) == (
            code,
            f"groups[1].{field}",
        )
        assert untouched(worker_)
        submit(client, group("fine"))
        assert client.record()["trajectory_id"] == "fine.0"


def test_a_prompt_one_short_of_the_context_gets_its_one_token() -> None:
    with worker(what=served(max_context=64)) as worker_, RawClient(worker_.address) as client:
        client.hello()
        submit(client, group(prompt=range(63), max_tokens=50))
        assert len(client.record()["segments"][0]["token_ids"]) == 64


# Credits.


def test_a_record_that_can_never_fit_is_refused_with_the_limit() -> None:
    with worker(limits=Limits(result_bytes=100_000)) as served, RawClient(served.address) as client:
        client.hello()
        reply = submit(client, group(max_tokens=None))
        assert refusal(reply) == ("bad_request", "groups[0].budget.max_total_tokens")
        assert "100000" in reply["error"]["message"]
        assert submit(client, group(max_tokens=None, budget={"max_total_tokens": 1000}))["type"] == "accepted"


def test_the_worker_stops_admitting_until_results_are_acknowledged_and_loses_nothing() -> None:
    # Each record is counted as 11 kB; three fit.
    with worker(limits=Limits(result_bytes=35_000)) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(n=8, max_tokens=100))
        held = [client.record(ack=False) for _ in range(3)]
        assert client.nothing(0.2)
        wire = client.call("status")["wire"]
        assert wire["credit_stalls"] > 0
        assert wire["reserved_bytes"] <= 35_000
        for record in held:
            client.send("ack", trajectory_ids=[record["trajectory_id"]])
        names = {record["trajectory_id"] for record in held} | {client.record()["trajectory_id"] for _ in range(5)}
        assert names == {f"g.{i}" for i in range(8)}
        eventually(lambda: untouched(served))


def test_no_more_run_at_once_than_allowed_and_no_more_wait() -> None:
    with worker(TimedEngine(0.01), at_once=2, max_waiting=4) as served, RawClient(served.address) as client:
        client.hello()
        assert submit(client, group("a", n=4, max_tokens=20))["type"] == "accepted"
        eventually(lambda: len(served.engine.live) == 2)
        reply = submit(client, group("b", n=3))
        assert refusal(reply)[0] == "overloaded"
        assert reply["error"]["retryable"]
        assert submit(client, group("c", n=2))["type"] == "accepted"
        assert len({client.record()["trajectory_id"] for _ in range(6)}) == 6


def test_higher_priority_starts_first_then_age() -> None:
    with worker(TimedEngine(0.005), at_once=1) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group("first", max_tokens=20))
        eventually(lambda: len(served.engine.live) == 1)
        submit(client, group("low", priority=-1), group("a"), group("b"), group("high", priority=5))
        order = [client.record()["group_id"] for _ in range(5)]
        assert order == ["first", "high", "a", "b", "low"]


# Cancel.


def test_cancel_ends_running_and_waiting_work_with_what_it_has_and_counts_the_rest() -> None:
    with worker(TimedEngine(0.01), at_once=1) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group("g", n=3, max_tokens=1000), group("h"))
        eventually(lambda: len(served.engine.live) == 1)
        eventually(lambda: client.call("ping")["type"] == "pong")
        reply = client.call("cancel", group_ids=["g", "none"], trajectory_ids=["g.1", "nobody"], batch_ids=["none"])
        assert reply["detail"] == {"cancelled": 3, "ended": 0, "unknown": 3}
        records = {(record := client.record())["trajectory_id"]: record for _ in range(4)}
        assert {records[f"g.{i}"]["finish_reason"] for i in range(3)} == {"abort_client"}
        assert records["h.0"]["status"] == "truncated"
        assert [len(records[f"g.{i}"]["segments"][0]["token_ids"]) for i in (1, 2)] == [3, 3]
        eventually(lambda: untouched(served))


def test_a_cancelled_trajectory_that_has_ended_is_left_alone() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group())
        assert client.record(ack=False)["status"] == "truncated"
        assert client.call("cancel", trajectory_ids=["g.0", "g.0"])["detail"] == {
            "cancelled": 0,
            "ended": 1,
            "unknown": 0,
        }
        client.send("ack", trajectory_ids=["g.0"])
        assert client.call("cancel", batch_ids=["b"])["detail"] == {"cancelled": 0, "ended": 0, "unknown": 1}


def test_many_waiting_trajectories_are_cancelled_while_pings_are_answered() -> None:
    with worker(TimedEngine(SLOW), at_once=1) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(n=2000, max_tokens=1000))
        cancel, ping = client.send("cancel", batch_ids=["b"]), client.send("ping")
        client.reply(cancel)
        client.reply(ping)
        assert client.call("status")["trajectories_waiting"] > 0
        for _ in range(2000):
            assert client.record(30)["status"] == "aborted"


# Versions and deadlines of what waits.


def commit(client: RawClient, version: int) -> None:
    name = f"u{version}"
    assert client.call("prepare_weights", update_id=name, path="w", version=version)["type"] == "weights_prepared"
    done = client.call("commit_weights", update_id=name, version=version, drain_timeout_s=5.0)
    assert done["type"] == "weights_committed", done


def test_a_group_waits_for_the_weights_it_asks_for_and_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rollout.batches")
    with worker(at_once=1) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group("later", min_version=2), group("latest", min_version=3), group("now"))
        (line,) = [record.getMessage() for record in caplog.records if "wait for weights" in record.getMessage()]
        assert line.endswith(": 2 wait for weights 2 or later; 0 serve")
        assert client.record()["group_id"] == "now"
        commit(client, 1)
        assert client.nothing(0.1) or client.event("group_done")
        commit(client, 2)
        record = client.record()
        assert (record["group_id"], record["segments"][0]["weight_versions"].tolist()) == ("later", [[2, 4]])
        commit(client, 3)
        assert client.record()["group_id"] == "latest"


def test_weights_that_never_come_are_a_stale_version_at_the_deadline() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(n=2, min_version=9, budget={"trajectory_deadline_s": 0.2}))
        for _ in range(2):
            record = client.record()
            assert (record["status"], record["error"]["code"]) == ("failed", "stale_version")
            assert record["times"]["queue"] == pytest.approx(record["wall_s"], rel=0.01)
            assert not record["segments"][0]["loss_mask"].any()
        assert client.event("group_done")["counts"] == {"failed": 2}
        eventually(lambda: untouched(served))


def test_the_deadline_of_a_trajectory_that_waits_for_room_ends_it_too() -> None:
    with worker(TimedEngine(SLOW), at_once=1) as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group("long", max_tokens=1000), group("due", budget={"trajectory_deadline_s": 0.2}))
        record = client.record()
        assert (record["group_id"], record["finish_reason"]) == ("due", "trajectory_deadline")
        assert record["truncation"] == {"limit": "trajectory_deadline_s", "value": 0.2}
        assert len(record["segments"][0]["token_ids"]) == 3


def test_a_sample_that_was_submitted_later_has_its_own_deadline() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        seconds = 0.5
        both = group(n=2, min_version=9, budget={"trajectory_deadline_s": seconds})
        submit(client, both | {"trajectory_ids": ["first"], "sample_indices": [0]})
        assert client.nothing(seconds / 2)
        submit(client, both | {"trajectory_ids": ["second"], "sample_indices": [1]})
        records = [client.record() for _ in range(2)]
        assert [record["trajectory_id"] for record in records] == ["first", "second"]
        assert all(record["wall_s"] >= seconds for record in records)
        eventually(lambda: untouched(served))


def test_many_groups_miss_their_deadline_while_pings_are_answered() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        overdue = {"min_version": 9, "budget": {"trajectory_deadline_s": 0.5}}
        submit(client, *(group(f"g{i}", n=16, **overdue) for i in range(500)))
        client.record()
        assert client.call("status")["trajectories_waiting"] > 0


def test_a_timer_of_a_finished_group_keeps_nothing_alive() -> None:
    with worker() as served, RawClient(served.address) as client:
        client.hello()
        submit(client, group(budget={"trajectory_deadline_s": 3600.0}))
        client.record()
        client.event("batch_done")
        eventually(lambda: untouched(served))
        assert served.call(lambda service: service.sessions.all[0].batches) == {}
