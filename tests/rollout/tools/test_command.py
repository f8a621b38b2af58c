"""Programs that a tool runs on the worker's loop: what they print, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollout.tools.command import command
from tests.rollout.tools.play import run

CHILDREN = """
import os, sys, time
if os.fork() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(300)
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_both_streams_and_the_exit_code() -> None:
    script = "import sys; print('out', flush=True); print('bad', file=sys.stderr); sys.exit(3)"
    assert run(command(sys.executable, "-c", script)) == "out\nbad\n\n[exit code 3]"
    assert run(command("true")) == ""


def test_there_is_nothing_to_read() -> None:
    assert run(command("cat")) == ""


def test_where_it_runs(tmp_path: Path) -> None:
    script = "import os; print(os.getcwd(), os.environ.get('GIVEN'), os.environ.get('HOME'))"
    text = run(command(sys.executable, "-c", script, cwd=str(tmp_path), env={"GIVEN": "x"}))
    assert text.split() == [os.path.realpath(tmp_path), "x", "None"]


@pytest.mark.parametrize("limit", [10, 100_000])
def test_output_is_bounded(limit: int) -> None:
    text = run(command("yes", limit=limit))
    shown, _, mark = text.partition("\n[cut")
    assert len(shown) == limit
    assert f"more than {limit} bytes" in mark


def test_a_program_that_prints_faster_than_it_is_read_is_ended_too() -> None:
    """Its pipe is paused when it is killed, and never comes to its end."""

    async def main() -> None:
        for limit in (10, 300_000, 10, 5_000_000, 10):
            text = await asyncio.wait_for(command("yes", limit=limit), 30)
            assert text.endswith("was ended]")

    run(main())


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        run(command("/no/such/program"))


def test_a_child_that_outlives_its_program_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    async def main() -> None:
        # The child keeps the output open: without an end of its own the wait would be for the child.
        task = asyncio.ensure_future(command(sys.executable, "-c", CHILDREN, str(file)))
        while not file.exists() or not file.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert gone(int(file.read_text()))
