"""Field reports on environments that fail and on how a worker ends, over the real engine. Numbers are the reports'."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocols.fields import Environment as Environ
from rollout.client import RolloutClient
from rollout.environments.base import Context, Environment, Step, TurnResult
from rollout.service.service import Timeouts
from tests import rigs
from tests.rollout.raw_client import RawClient, group
from tests.rollout.real_worker import real_worker
from tests.rollout.unharmed import sampled, unharmed, whole
from tests.rollout.workers import WorkerProcess, eventually


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rigs.write_rand(tmp_path_factory.mktemp("rand") / "w", rigs.RandModel(seed=12))


# 61: one environment that fails costs no other trajectory of its batch.


class Failing(Environment):
    """Raises in the stage that its config names, `exit`s or interrupts there; else three turns and a reward."""

    on_length = "continue"

    async def reset(self, context: Context) -> None:
        self.plan: dict[str, Any] = dict(context.config)
        self.fail("reset")

    async def step(self, turn: TurnResult) -> Step:
        self.fail(f"step {turn.index}")
        return Step(observation=[7], done=turn.index == 2)

    async def finish(self, _record: Any) -> float:
        self.fail("finish")
        return 1.0

    async def close(self) -> None:
        self.fail("close")

    def fail(self, stage: str) -> None:
        if self.plan.get("stage") == stage:
            raise {"raise": ValueError, "exit": SystemExit, "interrupt": KeyboardInterrupt, "stop": GeneratorExit}[
                self.plan["how"]
            ]("on purpose")


def test_61_one_failing_environment_costs_only_its_own_trajectory(checkpoint: Path) -> None:
    plans: dict[str, dict[str, str]] = {"healthy": {}, "close": {"stage": "close", "how": "raise"}}
    for stage in ("reset", "step 0", "step 2", "finish"):
        for how in ("raise", "exit", "interrupt", "stop"):
            plans[f"{stage} {how}"] = {"stage": stage, "how": how}
    env = "failing=tests.rollout.test_field_reports_ops:Failing"
    with real_worker(checkpoint, env=env) as served, RawClient(served.address) as client:
        client.hello(timeout=30)
        asked = [
            group(name, n=2, max_tokens=3, environment={"name": "failing", "config": plan})
            for name, plan in plans.items()
        ]
        with unharmed(served.address, provoked="on purpose"):
            assert client.call("submit", 30, batch_id="b", groups=asked)["type"] == "accepted"
            records = [whole(client.record(60)) for _ in range(2 * len(plans))]
            client.event("batch_done", 30)
    assert len({record["trajectory_id"] for record in records}) == 2 * len(plans)
    for record in records:
        plan = plans[record["group_id"]]
        if plan.get("stage") in (None, "close"):
            assert (record["status"], record["reward"], len(sampled(record))) == ("completed", 1.0, 9)
            continue
        assert (record["status"], record["finish_reason"], record["reward"]) == ("failed", "env_error", None)
        assert record["segments"][0]["loss_mask"].sum() == 0
        assert record["error"]["stage"] == plan["stage"].split()[0]
        assert "on purpose" in record["error"]["message"]


# 64: a group of which not all came through.


class Lossy(Environment):
    """Sample i does what the config's plan says at i: says nothing, hangs, fails, waits for a cancel, or is fine."""

    on_length = "continue"

    async def reset(self, context: Context) -> None:
        self.does = context.config["plan"][context.sample_index]

    async def step(self, turn: TurnResult) -> Step:
        if self.does == "nothing":
            return None  # type: ignore[return-value]
        if self.does in ("hang", "cancel"):
            await asyncio.Event().wait()
        if self.does == "fail":
            raise ValueError("on purpose")
        return Step(observation=[7], done=turn.index == 1, reward=1.0)


PLANS = {
    "four of eight": ["nothing", "fine", "hang", "fine", "cancel", "fine", "nothing", "fine"],
    "none of eight": ["nothing", "fail", "fail", "nothing", "cancel", "fail", "nothing", "fail"],
    "all of eight": ["fine"] * 8,
    "one, and fine": ["fine"],
    "one, and lost": ["fail"],
}
ENDS = {
    "fine": ("completed", "env_done"),
    "nothing": ("failed", "env_error"),
    "fail": ("failed", "env_error"),
    "hang": ("truncated", "tool_deadline"),
    "cancel": ("aborted", "abort_client"),
}


@pytest.mark.parametrize("name", PLANS)
def test_64_every_sample_of_a_group_comes_back_and_says_what_it_is_worth(checkpoint: Path, name: str) -> None:
    plan = PLANS[name]
    env = "lossy=tests.rollout.test_field_reports_ops:Lossy"
    with real_worker(checkpoint, env=env) as served, RolloutClient(served.address) as client:
        with unharmed(served.address, provoked="on purpose"):
            # A tool that hangs has its deadline; the one that is cancelled must not reach it first.
            deadline = 2.0 if "hang" in plan else 60.0
            asked = client.group(
                [1, 2, 3],
                n=len(plan),
                max_tokens=3,
                environment=Environ(name="lossy", config={"plan": plan}),
                tool_deadline_s=deadline,
            )
            batch = client.submit(asked)
            cancelled = [one for one, does in zip(asked.trajectory_ids, plan, strict=True) if does == "cancel"]
            if cancelled:
                client.cancel(trajectory_ids=cancelled)
            (members,) = batch.groups()
        assert [member.trajectory_id for member in members] == list(asked.trajectory_ids)
        for member, does in zip(members, plan, strict=True):
            assert (member.status, member.finish_reason) == ENDS[does], does
            if does in ("nothing", "fail"):
                assert not member.loss_mask.any()
            # What is missing is neither a copy nor a zero.
            assert member.reward is None or does == "fine"
        assert len({id(member.token_ids) for member in members}) == len(members)


# 72: the end of a worker with the real engine, in a thread and in a process of its own.


@contextmanager
def command(checkpoint: Path, folder: Path, engine: str, *arguments: str) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(
        "rollout",
        *("--weights", str(checkpoint), "--kv-tokens", "16384", "--engine-process", engine, *arguments),
        folder=folder,
    )
    try:
        yield worker
    finally:
        worker.kill()


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_72_what_cannot_end_in_the_drain_comes_back_and_no_process_is_left(
    checkpoint: Path, tmp_path: Path, engine: str
) -> None:
    with (
        command(checkpoint, tmp_path, engine, "--drain-timeout", "1", "--max-trajectories", "4") as worker,
        RawClient(worker.wait_ready(120).address) as client,
    ):
        client.hello(timeout=30)
        # `remote` ones wait for an answer that never comes; the fifth has not begun.
        wait = {"environment": {"name": "remote"}, "budget": {"on_length": "continue"}}
        client.call("submit", 30, batch_id="b", groups=[group("waits", n=4, max_tokens=3, **wait), group("queued")])
        for _ in range(4):
            client.event("turn_done", 30)
        children = psutil.Process(worker.process.pid).children(recursive=True)
        assert bool(children) == (engine == "process")
        worker.signal(signal.SIGTERM)
        eventually(lambda: client.call("status", 30)["state"] == "draining")
        late = client.call("submit", 30, batch_id="c", groups=[group("late")])["error"]
        assert late["code"] == "shutting_down"
        records = {(record := whole(client.record(30)))["trajectory_id"]: record for _ in range(5)}
        assert worker.wait(30) == 0
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert {record["finish_reason"] for record in records.values()} == {"abort_shutdown"}
    assert {name: len(sampled(record)) for name, record in records.items()} == {
        **{f"waits.{i}": 3 for i in range(4)},
        "queued.0": 0,
    }
    assert "Traceback" not in worker.log


@pytest.mark.parametrize("when", ["before it is ready", "during a prepare", "twice"])
def test_72_a_signal_at_an_awkward_time_leaves_no_process(checkpoint: Path, tmp_path: Path, when: str) -> None:
    with command(checkpoint, tmp_path, "process", "--drain-timeout", "60") as worker:
        process = psutil.Process(worker.process.pid)
        if when == "before it is ready":
            eventually(lambda: bool(process.children()) or worker.process.poll() is not None, 60)
            children = process.children(recursive=True)
            worker.signal(signal.SIGTERM)
        else:
            with RawClient(worker.wait_ready(120).address) as client:
                client.hello(timeout=30)
                children = process.children(recursive=True)
                if when == "during a prepare":
                    client.send("prepare_weights", update_id="u", path=str(checkpoint), version=1)
                else:
                    hang = {"environment": {"name": "remote"}, "budget": {"on_length": "continue"}}
                    client.call("submit", 30, batch_id="b", groups=[group(max_tokens=3, **hang)])
                    client.event("turn_done", 30)
                worker.signal(signal.SIGTERM)
                if when == "twice":
                    eventually(lambda: client.call("status", 30)["state"] == "draining")
                    worker.signal(signal.SIGTERM)
        assert children
        code = worker.wait(30)
        assert code == (128 + signal.SIGTERM if when == "twice" else 0)
        eventually(lambda: not any(alive(child) for child in children), 10)


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# 34: a killed client, with the real engine: its blocks are free, and the worker has told nobody's work apart.


def test_34_ten_clients_that_vanish_leave_the_engine_to_the_others(checkpoint: Path) -> None:
    with (
        real_worker(checkpoint, max_running=16, kv_tokens=32768, timeouts=Timeouts(client=0.5)) as served,
        unharmed(served.address),
        RawClient(served.address) as other,
    ):
        other.hello(timeout=30)
        other.call("submit", 30, batch_id="o", groups=[group("o", max_tokens=150, sampling={"seed": 1})])
        for i in range(10):
            victim = RawClient(served.address)
            victim.hello(timeout=30)
            victim.call("submit", 30, batch_id="v", groups=[group(f"v{i}", max_tokens=3000)])
            victim.socket.close(linger=0)
            victim.context.term()
        assert len(sampled(whole(other.record(60)))) == 150
        # Nobody ran to its limit: they were cut off.
        eventually(lambda: other.call("status", 30)["trajectories_running"] == 0, 30)
        assert other.call("status", 30)["wire"]["trajectories_cut_off"] == 10
