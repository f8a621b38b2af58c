"""Tools that hang, and those that wait for their processes: in time, in turn, and never a word of it to the model."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from typing import Any

import pytest

from rollout.environments.base import Context
from rollout.environments.pool import Owner, Pool
from rollout.tools.command import command
from rollout.tools.environment import ToolEnvironment
from tests.rollout.tools.play import observed, play, run
from tests.rollout.tools.sample_tools import lookup, wait


class Steady(ToolEnvironment):
    tools = (wait, lookup)


class Brief(Steady):
    deadline_s = 1.0  # type: ignore[misc]


class Hasty(Steady):
    wait_s = 0.3  # type: ignore[misc]


HANG = '<tool_call>{"name": "wait", "arguments": {"seconds": 600}}</tool_call>'
LOOK = '<tool_call>{"name": "lookup", "arguments": {"key": 4}}</tool_call>'


def test_a_wait_that_is_too_long_fails_the_trajectory_by_name_and_gives_its_other_calls_up() -> None:
    async def main() -> None:
        pool = Pool(1, "tools")
        try:
            await play(Steady, LOOK, "done", pool=pool)
            record = await play(Hasty, HANG + LOOK + HANG, "done", pool=pool)
            assert (record.status, record.finish_reason) == ("failed", "env_error")
            assert record.error is not None
            assert (record.error.code, record.error.stage) == ("overloaded", "step")
            assert "no process of tools could be had within 0.3 s: 1 of 1 are busy" in record.error.message
            assert record.error.retryable
            assert record.times.tool_wait >= 0.3
            began = time.monotonic()
            record = await play(Steady, LOOK, "done", pool=pool)
            assert time.monotonic() - began < 20, "the call that hung was not given up"
            assert record.status == "completed"
            assert pool.stats.calls_waiting == 0
        finally:
            await pool.close()

    run(main())


def test_a_deadline_of_the_trainer_ends_the_wait_too_and_cancelling_leaves_the_line() -> None:
    async def main() -> None:
        pool = Pool(1, "tools")
        try:
            await play(Steady, LOOK, "done", pool=pool)
            hung = asyncio.ensure_future(play(Brief, HANG, "done", pool=pool))
            while pool.stats.calls_total != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            record = await play(Hasty, LOOK, "done", pool=pool, budget={"tool_deadline_s": 0.1})
            assert (record.status, record.finish_reason) == ("truncated", "tool_deadline")
            assert pool.stats.calls_waiting == 0
            assert "timeout: no result within 1 s" in observed(await hung)[0]
        finally:
            await pool.close()

    run(main())


def test_another_clients_hung_tools_delay_nobody_and_ones_own_only_until_their_deadline() -> None:
    """6 trajectories of one client hang in two calls each of 1 s, with two processes for them: 6 s."""

    async def main() -> None:
        pool = Pool(3, "tools")
        try:
            await play(Steady, LOOK, "done", pool=pool)
            hung = [
                asyncio.ensure_future(play(Brief, HANG + HANG, "done", pool=pool, owner=Owner("a", trajectory=str(i))))
                for i in range(6)
            ]
            while not pool.stats.calls_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            others = [
                play(
                    Steady,
                    LOOK,
                    LOOK,
                    "done",
                    pool=pool,
                    owner=Owner("b", trajectory=str(i)),
                    budget={"tool_deadline_s": 5.0},
                )
                for i in range(3)
            ]
            records = await asyncio.gather(*others)
            assert [record.status for record in records] == ["completed"] * 3
            assert all("celsius" in text for record in records for text in observed(record)[:2])
            own = await play(Steady, LOOK, "done", pool=pool, owner=Owner("a", trajectory="late"))
            assert own.status == "completed"
            assert sum(task.done() for task in hung) <= 4, "it waited for second calls of others"
            for record in await asyncio.gather(*hung):
                assert record.status == "completed"
                assert observed(record)[0].count("timeout: no result within 1 s") == 2
            assert pool.stats.calls_waiting == 0
        finally:
            await pool.close()

    run(main())


class Beside(ToolEnvironment):
    """Tools on the loop and on threads."""

    begun = False

    def __init__(self) -> None:
        self.tools = (self.method, program)

    async def reset(self, context: Context) -> None:
        await super().reset(context)
        Beside.begun = True

    def method(self) -> str:
        """On a thread."""
        return "done"


async def program() -> str:
    """Beside the loop."""
    return await command("true")


SCHEMAS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("method", "program")
)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize("what", ["method", "program"])
def test_a_system_that_gives_no_thread_or_process_is_no_tool_that_failed(
    what: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "environment" and Beside.begun:
            raise RuntimeError("can't start new thread")
        start(thread)

    def no_process(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Beside, "begun", False)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    call = f'<tool_call>{{"name": "{what}", "arguments": {{}}}}</tool_call>'
    record = run(play(Beside, call, "done", tools=SCHEMAS))
    assert (record.status, record.finish_reason) == ("failed", "env_error")
    assert record.error is not None
    assert (record.error.code, record.error.stage, record.error.retryable) == ("overloaded", "step", True)
    assert len(record.segments[0].turns) == 1, "the model never reads of it"
    assert ("no thread could be started" if what == "method" else os.strerror(number)) in record.error.message


def test_a_program_that_is_not_there_is_a_tool_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "true")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", nowhere)
    record = run(play(Beside, '<tool_call>{"name": "program", "arguments": {}}</tool_call>', "done", tools=SCHEMAS))
    assert record.status == "completed"
    assert "error: FileNotFoundError: [Errno 2]" in observed(record)[0]
