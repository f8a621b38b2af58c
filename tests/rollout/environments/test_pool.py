"""Processes for foreign code: whatever it does ends in time, alone, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.environments import processes, stock, warden
from rollout.environments.frames import MAX_RESULT
from rollout.environments.pool import NoProcess, Owner, Pool, ProcessDied, Reported
from rollout.environments.processes import Process
from tests.rollout.build import run
from tests.rollout.elsewhere import say_from
from tests.rollout.environments import foreign
from tests.rollout.workers import ROOT, eventually, soon

GRACE_S = 2.0


def with_pool(main: Callable[[Pool], Awaitable[None]], size: int = 3) -> None:
    """One session may have one process less."""

    async def body() -> None:
        pool = Pool(size, "tests")
        try:
            await main(pool)
        finally:
            pids = pids_of(pool)
            await pool.close()
            await soon(lambda: not any(alive(pid) for pid in pids))

    run(body())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids_of(pool: Pool) -> tuple[int, ...]:
    return tuple(process.pid for process in pool.processes)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(folder: Path) -> list[int]:
    return [int((folder / name).read_text()) for name in ("child", "grandchild")]


def test_a_function_is_called_in_another_process_and_plain_values_cross() -> None:
    async def main(pool: Pool) -> None:
        assert await pool.call(foreign.add, (2, 3)) == 5
        assert await pool.call(foreign.later, (0.0, "x")) == "x"
        assert await pool.call(foreign.pid) not in (os.getpid(), *pids_of(pool))
        got = await pool.call(foreign.array, (1000,))
        assert got["ids"].dtype == np.int32
        assert got["ids"].tolist() == list(range(1000))
        assert (got["reward"], got["nested"]) == (0.5, [(1, "ä"), {2.5, None}, b"x"])
        assert len(pids_of(pool)) == 1, "one at a time needs one process"

    with_pool(main)


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (foreign.fail, (ValueError("boom"),), "^ValueError: boom$"),
        (foreign.fail, (SystemExit(3),), "^SystemExit: 3$"),
        (foreign.fail, (KeyboardInterrupt("boom"),), "^KeyboardInterrupt: boom$"),
        (foreign.fail, (asyncio.CancelledError(),), "^CancelledError: $"),
        (foreign.unprintable, (), r"^Unprintable \(it cannot be printed\)$"),
        (foreign.own, (), "returned a tests.rollout.environments.foreign.Own, which is no plain value"),
        (foreign.unpicklable, (), "^TypeError: cannot pickle '_thread.lock'"),
        (foreign.large, (MAX_RESULT + 1,), "too large"),
    ],
)
def test_an_error_comes_back_as_text_and_its_process_goes_on(function: Any, args: Any, message: str) -> None:
    async def main(pool: Pool) -> None:
        with pytest.raises(Reported) as caught:
            await pool.call(function, args)
        assert re.search(message, str(caught.value)), caught.value
        before = pids_of(pool)
        assert await pool.call(foreign.add, (1, 1)) == 2
        assert pids_of(pool) == before

    with_pool(main)


def test_an_error_brings_its_traceback_and_is_bounded() -> None:
    async def main(pool: Pool) -> None:
        with pytest.raises(Reported) as caught:
            await pool.call(foreign.fail, (ValueError("x" * 1_000_000),))
        assert len(str(caught.value)) < 20_000
        with pytest.raises(Reported) as caught:
            await pool.call(foreign.fail, (ValueError("boom"),))
        assert "foreign.py" in caught.value.__notes__[0]

    with_pool(main)


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (foreign.leave, (3,), "ended with exit code 3"),
        (foreign.leave, (0,), "ended with exit code 0"),
        (foreign.kill_self, (signal.SIGKILL,), r"killed by signal 9 \(Killed\)"),
        (
            foreign.read_nowhere,
            (),
            r"signal 11 \(Segmentation fault\); .* last words\nFatal.*\nCurrent.*in read_nowhere",
        ),
        (foreign.kill_parent, (), "gone|killed by signal 9"),
    ],
)
def test_a_death_is_noticed_at_once_and_the_next_call_has_a_new_process(function: Any, args: Any, message: str) -> None:
    async def main(pool: Pool) -> None:
        await pool.call(foreign.add, (1, 1))
        began = time.monotonic()
        with pytest.raises(ProcessDied, match=f"(?s){message}"):
            await pool.call(function, args, 60.0)
        assert time.monotonic() - began < 5.0
        assert await pool.call(foreign.add, (1, 1)) == 2

    with_pool(main)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (foreign.sleep, (600,)),
        (foreign.burn, ()),
        (foreign.stubborn, ()),
        (foreign.print_for_ever, ()),
        (foreign.later, (600.0, None)),
    ],
)
def test_a_deadline_ends_whatever_runs(function: Any, args: Any) -> None:
    async def main(pool: Pool) -> None:
        await pool.call(foreign.add, (1, 1))
        (pid,) = pids_of(pool)
        beside = asyncio.ensure_future(pool.call(foreign.later, (0.6, "beside")))
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await pool.call(function, args, 0.3)
        assert time.monotonic() - began < 0.3 + GRACE_S
        assert await beside == "beside"
        while alive(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await pool.call(foreign.add, (1, 1)) == 2

    with_pool(main)


@pytest.mark.parametrize(
    "kind", ["a child and its child", "in a session of its own", "that ignores signals", "left behind", "orphaned"]
)
def test_no_process_that_a_call_started_survives_it(kind: str, tmp_path: Path) -> None:
    async def main(pool: Pool) -> None:
        if kind == "orphaned":
            await pool.call(foreign.orphan, (str(tmp_path),), 30.0)
        elif kind == "left behind":
            await pool.call(start_and_return, (str(tmp_path),), 30.0)
        else:
            call = pool.call(start, (str(tmp_path), kind), 600.0)
            task = asyncio.ensure_future(call)
            while not (tmp_path / "grandchild").exists() or not (tmp_path / "grandchild").read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert all(alive(pid) for pid in children_of(tmp_path))
            task.cancel()
            await asyncio.wait((task,))
        began = time.monotonic()
        while any(alive(pid) for pid in children_of(tmp_path)):
            assert time.monotonic() - began < 10
            await asyncio.sleep(0.01)

    with_pool(main)


def test_who_stops_the_process_that_watches_over_it_ends_all_the_same(tmp_path: Path) -> None:
    async def main(pool: Pool) -> None:
        note = tmp_path / "pid"
        call = asyncio.ensure_future(pool.call(foreign.stop_parent, (str(note),)))
        await soon(lambda: note.exists() and bool(note.read_text()))
        (watching,) = pids_of(pool)
        call.cancel()
        await soon(lambda: not alive(int(note.read_text())) and not alive(watching))

    with_pool(main)


def start(folder: str, kind: str) -> int:
    return foreign.start_child(folder, session="session" in kind, ignore="ignores" in kind)


def start_and_return(folder: str) -> int:
    return foreign.start_child(folder, wait=False)


def test_standard_input_is_at_its_end_and_output_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async def main(pool: Pool) -> None:
        assert await pool.call(foreign.read_stdin, (), 10.0) == ""
        caplog.set_level("DEBUG", logger="rollout.environments.output")
        with pytest.raises(TimeoutError):
            await pool.call(foreign.print_for_ever, (), 0.5)
        said = [record for record in caplog.records if record.name == "rollout.environments.output"]
        assert 0 < len(said) < 100
        assert all(len(record.getMessage()) < 2000 for record in said)

    with_pool(main)


def test_foreign_code_gives_way_and_is_the_first_to_go() -> None:
    async def main(pool: Pool) -> None:
        nice, score = await pool.call(foreign.standing)
        assert nice == os.nice(0) + warden.NICENESS
        assert score == 1000

    with_pool(main)


def test_a_process_inherits_no_descriptor_of_ours(tmp_path: Path) -> None:
    import zmq

    async def main(pool: Pool) -> None:
        context = zmq.Context()
        server = context.socket(zmq.ROUTER)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with (tmp_path / "ours").open("w"):
            theirs = await pool.call(foreign.open_descriptors)
            ours = set(os.readlink(f"/proc/self/fd/{server.fd}").split())
        assert not ours & set(theirs.values())
        assert not any("ours" in target for target in theirs.values())
        assert "zmq" not in await pool.call(foreign.modules)
        assert sum(target.startswith("socket:") for target in theirs.values()) <= 3, theirs
        assert port
        server.close(0)
        context.term()

    with_pool(main)


def test_calls_wait_for_a_free_process_and_their_deadline_with_them() -> None:
    async def main(pool: Pool) -> None:
        began = time.monotonic()
        await asyncio.gather(*(pool.call(foreign.sleep, (0.2,), 10.0) for _ in range(4)))
        assert time.monotonic() - began >= 0.4, "two processes, four calls"
        assert len(pids_of(pool)) == 2
        slow = asyncio.ensure_future(pool.call(foreign.sleep, (1.0,)))
        slow_too = asyncio.ensure_future(pool.call(foreign.sleep, (1.0,)))
        await asyncio.sleep(0.1)
        assert await pool.call(foreign.sleep, (0.0,), 0.5) == 0.0
        await asyncio.gather(slow, slow_too)

    with_pool(main)


def test_a_wait_for_a_process_ends_in_time_by_name_and_the_line_moves_on() -> None:
    async def main(pool: Pool) -> None:
        await asyncio.gather(*(pool.call(foreign.later, (0.1, None)) for _ in range(2)))
        slow = [asyncio.ensure_future(pool.call(foreign.later, (600.0, None))) for _ in range(2)]
        await asyncio.sleep(0)
        began = time.monotonic()
        with pytest.raises(
            NoProcess, match=r"of tests could be had within 0\.2 s: 2 of 3 are busy, 0 not up yet, and 1 call"
        ):
            await pool.call(foreign.add, (1, 1), 10.0, wait=0.2)
        assert 0.2 <= time.monotonic() - began < 5.0
        assert pool.stats.calls_waiting == 0
        given_up = asyncio.ensure_future(pool.call(foreign.add, (1, 1)))
        patient = asyncio.ensure_future(pool.call(foreign.add, (1, 1), wait=60.0))
        await asyncio.sleep(0)
        assert pool.stats.calls_waiting == 2
        given_up.cancel()
        slow[0].cancel()
        assert await patient == 2
        slow[1].cancel()
        await asyncio.wait((given_up, *slow))
        await soon(lambda: pool.stats.deaths_total == 2)
        assert pool.stats.calls_waiting == 0

    with_pool(main)


def test_a_process_that_does_not_come_up_is_not_called_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(pool: Pool) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Process, "_take", lambda *_: None)  # it hears of nothing, so of no process that is up
            with pytest.raises(NoProcess, match=r"had within 0\.05 s: 0 of 3 are busy, 1 not up yet, and 1 calls"):
                await pool.call(foreign.add, (1, 1), wait=0.05)
            with pytest.raises(NoProcess, match="2 not up yet"):
                await pool.lease(0.05)
        stats = pool.stats
        assert (stats.calls_waiting, stats.calls_total, stats.unserved_total) == (0, 0, 2)

    with_pool(main)


def test_a_call_that_is_given_up_as_its_process_comes_gives_it_back() -> None:
    async def main(pool: Pool) -> None:
        running = asyncio.ensure_future(pool.call(foreign.later, (0.2, None)))
        await asyncio.sleep(0)
        given_up = asyncio.ensure_future(pool.call(foreign.add, (1, 1)))
        await running
        # It has been given the process in this turn of the loop, and does not know yet.
        given_up.cancel()
        await asyncio.wait((given_up,))
        assert given_up.cancelled()
        assert await pool.call(foreign.add, (1, 1), wait=10.0) == 2
        assert len(pids_of(pool)) == 1, "nobody had to be killed for it"

    with_pool(main, size=1)


def test_hung_calls_of_many_return_their_processes_at_their_deadline() -> None:
    """20 hang on 2 processes for 0.2 s each: 2 s are theirs, and the one that works waits no longer than for one."""

    async def main(pool: Pool) -> None:
        await asyncio.gather(*(pool.call(foreign.later, (0.1, None)) for _ in range(2)))
        began = time.monotonic()
        hung = [
            asyncio.ensure_future(pool.call(how, args, 0.2, owner=Owner("a", trajectory=str(i))))
            for i, (how, args) in enumerate([(foreign.sleep, (600,)), (foreign.stubborn, ())] * 10)
        ]
        second = asyncio.ensure_future(pool.call(foreign.sleep, (600,), 0.2, owner=Owner("a", trajectory="0")))
        ended: list[asyncio.Future[Any]] = []
        for task in (*hung, second):
            task.add_done_callback(ended.append)
        healthy = asyncio.ensure_future(pool.call(foreign.add, (1, 1), 10.0, owner=Owner("b")))
        assert await healthy == 2
        assert sum(task.done() for task in hung) <= 2, "another's hung calls were waited for"
        results = await asyncio.gather(*hung, return_exceptions=True)
        took = time.monotonic() - began
        assert [type(result) for result in results] == [TimeoutError] * 20
        assert 2.0 <= took < 10.0
        with pytest.raises(TimeoutError):
            await second
        assert second in ended[-2:], "the second call of one went before the first of another"
        await soon(lambda: pool.stats.deaths_total == 21)
        stats = pool.stats
        assert (stats.calls_waiting, stats.calls_total) == (0, 2 + 20 + 1 + 1)
        assert 15.0 < stats.wait_s_total < 20 * took

    with_pool(main)


def test_the_last_one_is_for_a_session_that_has_none_and_there_are_never_more() -> None:
    async def main(pool: Pool) -> None:
        hung = [asyncio.ensure_future(pool.call(foreign.later, (600.0, None), owner=Owner("a"))) for _ in range(4)]
        await asyncio.sleep(0)
        assert await pool.call(foreign.add, (1, 1), owner=Owner("b")) == 2
        last = await pool.call(foreign.pid, owner=Owner("b"))
        assert await pool.call(foreign.pid, owner=Owner("c")) == last
        assert (pool.stats.processes, pool.stats.calls_waiting) == (3, 2), "a may have two"
        slow = asyncio.ensure_future(pool.call(foreign.sleep, (0.3,), owner=Owner("b")))
        await asyncio.sleep(0)
        for late in ("b", "c"):
            with pytest.raises(NoProcess, match="3 of 3 are busy"):
                await pool.call(foreign.add, (1, 1), owner=Owner(late), wait=0.02)
        assert await pool.call(foreign.pid, owner=Owner("c"), wait=60.0) == last, "before the third of a"
        await slow
        assert (pool.stats.processes, pool.stats.deaths_total, pool.stats.unserved_total) == (3, 0, 2)
        for task in hung:
            task.cancel()
        await asyncio.wait(hung)

    with_pool(main)


def test_who_is_not_used_any_more_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "IDLE_S", 0.3)

    async def main(pool: Pool) -> None:
        await asyncio.gather(*(pool.call(foreign.sleep, (0.05,)) for _ in range(2)))
        leased = await pool.lease()
        assert pool.stats.processes == 2
        await soon(lambda: pool.stats.processes == 1)
        assert pool.processes == (leased,)
        assert pool.stats.deaths_total == 0
        pool.release(leased)
        await soon(lambda: pool.stats.processes == 0)
        assert await pool.call(foreign.add, (1, 1)) == 2

    with_pool(main)


def test_whoever_waits_when_the_pool_closes_is_told() -> None:
    async def main(pool: Pool) -> None:
        calls = [asyncio.ensure_future(pool.call(foreign.later, (600.0, None))) for _ in range(4)]
        await soon(lambda: pool.stats.calls_waiting == 2)
        await pool.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [ProcessDied] * 2 + [NoProcess] * 2
        with pytest.raises(NoProcess, match="no more processes"):
            await pool.lease()

    with_pool(main)


def test_objects_are_kept_in_a_process_that_several_share() -> None:
    async def main(pool: Pool) -> None:
        one, two, three = [await pool.lease() for _ in range(3)]
        assert one is not two
        assert three in (one, two)
        for number, start in ((1, 10), (2, 20)):
            assert await one.run(foreign.Counter, (start,), keep=number) is None
        assert await one.run(foreign.Counter.add, (5,), of=1) == 15
        assert await one.run(foreign.Counter.add, (5,), of=2) == 25
        one.forget(1)
        with pytest.raises(Reported, match="KeyError"):
            await one.run(foreign.Counter.add, (5,), of=1)
        for process in (one, two, three):
            pool.release(process)
        assert await pool.lease() in (one, two)

    with_pool(main, size=2)


def test_python_code_that_is_given_up_ends_without_its_process() -> None:
    async def main(pool: Pool) -> None:
        process = await pool.lease()
        await process.run(foreign.Counter, (1,), keep=1)
        for function, args in ((foreign.burn, ()), (foreign.later, (600.0, 1))):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(process.run(function, args), 0.2)
        assert await process.run(foreign.Counter.add, (1,), of=1) == 2
        waiting = asyncio.ensure_future(process.run(foreign.later, (600.0, 1)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.run(foreign.sleep, (600,)), 0.2)
        with pytest.raises(ProcessDied, match="a call in it was given up and did not end"):
            await waiting
        with pytest.raises(ProcessDied):
            await process.run(foreign.Counter.add, (1,), of=1)

    with_pool(main)


def test_processes_are_forked_in_a_process_that_is_replaced_when_it_dies() -> None:
    async def main(pool: Pool) -> None:
        await pool.call(foreign.add, (1, 1))
        (first,) = pids_of(pool)
        nursery = parent_of(first)
        os.kill(nursery, signal.SIGKILL)
        while alive(nursery):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert await pool.call(foreign.add, (1, 1)) == 2, "its children live on"
        assert pids_of(pool) == (first,)
        with pytest.raises(ProcessDied):
            await pool.call(foreign.leave, (1,))
        assert await pool.call(foreign.add, (1, 1)) == 2

    with_pool(main)


def test_processes_do_not_draw_the_same_numbers() -> None:
    async def main(pool: Pool) -> None:
        drawn = await asyncio.gather(*(pool.call(foreign.draw, (0.2,)) for _ in range(2)))
        assert len({number for numbers in drawn for number in numbers}) == 4

    with_pool(main)


def test_a_shared_value_is_read_where_it_is_needed() -> None:
    async def main(pool: Pool) -> None:
        first = await pool.lease()
        value = {"text": "x" * 1000}
        shared = pool.share(value)
        assert pool.share(value) is shared
        other = pool.share([1, 2])
        assert await first.run(foreign.read_shared, (shared,)) == value
        assert await first.run(foreign.read_shared, (other,)) == [1, 2]
        pool.release(first)

    with_pool(main)


def test_what_cannot_be_sent_is_an_error_of_the_caller() -> None:
    async def main(pool: Pool) -> None:
        with pytest.raises(AttributeError, match="local object"):
            await pool.call(lambda: 1)
        assert await pool.call(foreign.add, (1, 1)) == 2

    with_pool(main)


def test_children_are_found_with_and_without_the_kernels_lists() -> None:
    alive_child = subprocess.Popen(["sleep", "600"])
    dead_child = subprocess.Popen(["true"])
    try:
        eventually(lambda: not alive(dead_child.pid))
        for found in (warden.children(), warden._children_of(os.getpid())):
            assert alive_child.pid in found
            assert dead_child.pid not in found
    finally:
        alive_child.kill()
        for child in (alive_child, dead_child):
            child.wait()


def test_one_that_watches_and_was_stopped_ends_with_the_worker(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from rollout.environments.pool import Pool\n"
        "from tests.rollout.environments import foreign\n"
        "asyncio.run(Pool(1).call(foreign.stop_parent, (sys.argv[1],)))"
    )
    note = tmp_path / "pid"
    worker = subprocess.Popen([sys.executable, "-c", code, str(note)], cwd=ROOT)
    try:
        eventually(lambda: note.exists() and bool(note.read_text()), 30)
        pid = int(note.read_text())
        watching = parent_of(pid)
    finally:
        worker.kill()
        worker.wait()
    eventually(lambda: not alive(pid) and not alive(watching))


def test_everything_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from rollout.environments.pool import Pool\n"
        "from tests.rollout.environments import foreign\n"
        "asyncio.run(Pool(1).call(foreign.start_child, (sys.argv[1],)))"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    try:
        eventually(lambda: (tmp_path / "grandchild").exists() and bool((tmp_path / "grandchild").read_text()), 30)
        pids = children_of(tmp_path)
        assert all(alive(pid) for pid in pids)
    finally:
        worker.kill()
        worker.wait()
    eventually(lambda: not any(alive(pid) for pid in pids))


def test_an_import_that_one_gives_up_goes_on_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in a system call, where nothing can interrupt it."""
    code = (
        f"import pathlib\nwith pathlib.Path({str(tmp_path / 'begun')!r}).open('a') as file: file.write('x')\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): os.system('sleep 1')"
    )
    say = say_from(tmp_path, monkeypatch, code)

    async def main(pool: Pool) -> None:
        async def use() -> str:
            process = await pool.lease()
            try:
                await process.imports(say)
                return str(await process.run(say))
            finally:
                pool.release(process)

        users = [asyncio.ensure_future(use()) for _ in range(3)]
        await soon((tmp_path / "begun").exists)
        (process,) = pool.processes
        users[0].cancel()
        users[1].cancel()
        await asyncio.wait(users[:2])
        await asyncio.sleep(2 * processes.GRACE_S)
        (tmp_path / "go").touch()
        assert await users[2] == "said"
        assert (tmp_path / "begun").read_text() == "x", "it was imported more than once"
        assert pool.processes == (process,)

    with_pool(main, size=1)


def test_an_import_that_nobody_waits_for_any_more_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()"
    say = say_from(tmp_path, monkeypatch, f"import pathlib, time\n{begun}\ntime.sleep(600)")

    async def main(pool: Pool) -> None:
        process = await pool.lease()
        importing = asyncio.ensure_future(process.imports(say))
        await soon((tmp_path / "begun").exists)
        importing.cancel()
        await asyncio.wait((importing,))
        assert process.died.done()
        pool.release(process)
        assert await pool.call(foreign.add, (1, 2)) == 3

    with_pool(main, size=1)
