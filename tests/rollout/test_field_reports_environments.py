"""Field reports 61, 62 and 73, where environment code runs in processes of its own: it can do more harm there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocols.fields import ModelInfo
from rollout.client import RolloutClient, Trajectory
from rollout.environments.base import Context, Environment, Step, TurnResult
from rollout.environments.registry import Registry
from rollout.service.service import Served
from tests.rollout.environments import foreign
from tests.rollout.forking import Forking
from tests.rollout.raw_client import RawClient, group
from tests.rollout.timed_engine import VOCAB
from tests.rollout.workers import WorkerThread, eventually, worker


class Harmful(Environment):
    """config: {"stage", "how", "folder"}; healthy it plays three turns and is worth 1."""

    isolation = "process"
    on_length = "continue"

    def reset(self, context: Context) -> None:
        self.config = dict(context.config)
        self.harm("reset")

    def step(self, turn: TurnResult) -> Any:
        self.harm(f"step {turn.index}")
        return Step(observation=[7], done=turn.index == 2)

    def finish(self, _record: Any) -> float:
        self.harm("finish")
        return 1.0

    def harm(self, stage: str) -> None:
        if self.config.get("stage") == stage:
            HARM[self.config["how"]](self.config.get("folder", ""))


class Waiting(Harmful):
    """Its second turn waits for ever, on the event loop of its process."""

    async def step(self, turn: TurnResult) -> Any:
        await asyncio.sleep(3600 if turn.index == 1 else 0)
        return Step(observation=[7])


def interrupt(_: str) -> None:
    raise KeyboardInterrupt("on purpose")


def read_stdin(_: str) -> None:
    if sys.stdin.read() or subprocess.run(["cat"], capture_output=True, check=True).stdout:
        raise AssertionError("somebody typed")
    raise EOFError("nothing to read")


HARM: dict[str, Any] = {
    "raise": lambda _: foreign.fail(ValueError("on purpose")),
    "exit": lambda _: sys.exit("on purpose"),
    "interrupt": interrupt,
    "leave": lambda _: os._exit(9),
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": lambda _: os.abort(),
    "sleep": lambda _: time.sleep(30),
    "burn": lambda _: foreign.burn(),
    "print": lambda _: foreign.print_for_ever(),
    "child": lambda folder: foreign.start_child(folder, ignore=True),
    "session": lambda folder: foreign.start_child(folder, session=True, ignore=True),
    "stdin": read_stdin,
}


@contextmanager
def harmed(processes: int = 8) -> Iterator[WorkerThread]:
    """A worker that must be whole afterwards: idle, and without a child."""
    model = ModelInfo(architecture="stub", dtype="float32", vocab_size=VOCAB, max_context=16384)
    registry = Registry({"harmful": Harmful, "waiting": Waiting, "forking": Forking}, processes=2 * processes)
    with worker(what=Served(model, 0, "stub:start", registry)) as served:
        yield served
        with RawClient(served.address) as client:
            client.hello()
            client.call("submit", batch_id="smoke", groups=[group("smoke", prompt=[5, 6, 7])])
            assert client.record()["status"] in ("completed", "truncated")
        runs = served.service.runs
        eventually(lambda: not served.engine.live and runs.results == 0 and runs.idle.is_set())
    eventually(lambda: not psutil.Process().children(recursive=True))


def play(client: RolloutClient, plans: dict[str, dict[str, Any]], **budget: Any) -> dict[str, Trajectory]:
    groups = [
        client.group(
            [5, 6, 7],
            id=name,
            max_tokens=3,
            environment="waiting" if plan.get("how") == "await" else "harmful",
            config=plan,
            **budget,
        )
        for name, plan in plans.items()
    ]
    return {trajectory.group_id: trajectory for trajectory in client.submit(groups)}


# 61: one environment that fails costs no other trajectory of its batch.


def test_61_of_eight_in_processes_each_ends_for_itself() -> None:
    plans = {
        "reset": {"stage": "reset", "how": "raise"},
        "step 2": {"stage": "step 2", "how": "raise"},
        "finish": {"stage": "finish", "how": "raise"},
        "interrupt": {"stage": "step 1", "how": "interrupt"},
        "exit": {"stage": "step 0", "how": "exit"},
        **{f"healthy {i}": {} for i in range(3)},
    }
    with harmed() as served, RolloutClient(served.address) as client:
        ended = play(client, plans)
    for name, plan in plans.items():
        trajectory = ended[name]
        if not plan:
            assert (trajectory.status, trajectory.reward, int(trajectory.loss_mask.sum())) == ("completed", 1.0, 9)
            continue
        assert (trajectory.status, trajectory.finish_reason, trajectory.reward) == ("failed", "env_error", None)
        assert trajectory.loss_mask.sum() == 0
        assert trajectory.error is not None
        assert trajectory.error.stage == plan["stage"].split()[0]
        assert "on purpose" in trajectory.error.message
        assert len(trajectory.turns) == {"reset": 0, "exit": 1, "interrupt": 2}.get(name, 3)


@pytest.mark.parametrize(
    ("how", "said"), [("leave", "exit code 9"), ("crash", "signal 11"), ("abort", r"signal 6 \(Aborted\)")]
)
def test_61_a_process_that_dies_costs_what_it_served_and_no_more(how: str, said: str) -> None:
    plans = {"harmful": {"stage": "step 1", "how": how}} | {f"healthy {i}": {} for i in range(7)}
    with harmed() as served, RolloutClient(served.address) as client:
        began = time.monotonic()
        ended = play(client, plans)
        assert time.monotonic() - began < 30
        # Eight processes for eight trajectories: each had one of its own.
        assert [ended[f"healthy {i}"].reward for i in range(7)] == [1.0] * 7
        failure = ended["harmful"].error
        assert failure is not None
        assert failure.stage == "step"
        with pytest.raises(ValueError, match=said):
            raise ValueError(failure.message)
        assert play(client, {"after": {}})["after"].reward == 1.0


def test_61_in_one_process_the_others_of_it_fail_by_name_and_at_once() -> None:
    plans = {"harmful": {"stage": "step 1", "how": "leave"}, "waiting": {"how": "await"}}
    with harmed(processes=1) as served, RolloutClient(served.address) as client:
        began = time.monotonic()
        ended = play(client, plans)
        assert time.monotonic() - began < 30, "nobody waited for a deadline"
        for trajectory in ended.values():
            assert trajectory.error is not None
            assert "exit code 9" in trajectory.error.message
        assert play(client, {"after": {}})["after"].reward == 1.0


# 62: environment code that does not answer.


@pytest.mark.parametrize("how", ["await", "sleep", "burn", "print", "child", "session"])
def test_62_each_ends_within_its_deadline_and_a_grace(how: str, tmp_path: Path) -> None:
    plans: dict[str, dict[str, Any]] = {
        how: {"stage": "step 1", "how": how, "folder": str(tmp_path)},
        "beside": {},
    }
    with harmed() as served, RolloutClient(served.address) as client:
        play(client, {"warm": {}, "warm too": {}})
        ended = play(client, plans, tool_deadline_s=1.0)
        trajectory = ended[how]
        assert (trajectory.status, trajectory.finish_reason) == ("truncated", "tool_deadline")
        assert trajectory.turns[1].times.tool_wait < 1.0 + 2.0
        assert trajectory.loss_mask.sum() == 6, "what was sampled can be trained on"
        assert ended["beside"].reward == 1.0
        if how in ("child", "session"):
            pids = [int((tmp_path / name).read_text()) for name in ("child", "grandchild")]
            eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_62_there_is_nothing_to_read_on_stdin() -> None:
    with harmed() as served, RolloutClient(served.address) as client:
        trajectory = play(client, {"stdin": {"stage": "step 0", "how": "stdin"}}, tool_deadline_s=20.0)["stdin"]
        assert trajectory.error is not None
        assert trajectory.error.message == "EOFError: nothing to read"


# 73: a ZeroMQ context made before a fork.


def test_73_nothing_of_the_workers_sockets_is_there() -> None:
    with harmed(processes=1) as served:
        registry = served.service.environments

        async def look() -> dict[str, str]:
            return await registry._pool.call(foreign.open_descriptors)

        theirs = set(asyncio.run_coroutine_threadsafe(look(), served.loop).result(30).values())
        ours = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
        assert sum(target.startswith("socket:") for target in ours) > 5
        assert not {target for target in theirs & ours if target.startswith("socket:")}
