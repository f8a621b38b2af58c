"""Threads, forks, interrupts and interpreter exits."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from protocols import Cancel, Internal, SubmitBatch
from rollout.client import RolloutClient
from tests.rollout.client.fake_worker import FakeWorker

Start = Callable[..., FakeWorker]
Connect = Callable[..., RolloutClient]
Later = Callable[..., Future[Any]]

ROOT = Path(__file__).parents[3]


def python(code: str, *arguments: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_takes_neither_torch_nor_long() -> None:
    """Half a second of CPU; on a machine that takes more than 0.1 s for numpy alone, in proportion."""
    code = """
        import sys, time
        start = time.process_time()
        import numpy
        numpy_s = time.process_time() - start
        import rollout.client
        print(numpy_s, time.process_time() - start, *{"torch", "transformers", "engine", "asyncio"} & set(sys.modules))
    """
    for _ in range(5):
        numpy_s, taken, *heavy = python(code).stdout.split()
        assert not heavy
        limit = 0.5 * max(1.0, float(numpy_s) / 0.1)
        if float(taken) < limit:
            return
    pytest.fail(f"importing the client took {taken} s of CPU, more than {limit}")


def test_two_clients_do_not_meet(start: Start, connect: Connect) -> None:
    worker = start(hold=True)
    clients = [connect(worker), connect(worker)]
    batches = [client.submit(client.group([1], n=2)) for client in clients]
    assert len(worker.sessions) == 2
    clients[0].close()
    worker.wait_for(lambda: worker.of(Cancel))
    worker.finish()
    assert len(batches[1].results()) == 2
    names = [name for submit in worker.of(SubmitBatch) for name in submit.groups[0].trajectory_ids]
    assert len(set(names)) == 4


def test_one_client_for_many_threads(start: Start, connect: Connect, later: Later) -> None:
    client = connect(start())

    def work(number: int) -> list[str]:
        found = []
        for _ in range(5):
            batch = client.submit(client.group([number], n=3, metadata={"thread": number}))
            found += [t.trajectory_id for t in batch if t.metadata["thread"] == number]
            client.ping()
        return found

    results = [later(work, number) for number in range(8)]
    found = [name for result in results for name in result.result(30)]
    assert len(found) == len(set(found)) == 8 * 5 * 3


def test_one_batch_for_many_threads(start: Start, connect: Connect, later: Later) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=40)
    batch = client.submit(group)
    results = [later(lambda: [t.trajectory_id for t in batch]) for _ in range(4)]
    for name in group.trajectory_ids:
        worker.finish(name)
    found = [name for result in results for name in result.result(30)]
    assert sorted(found) == sorted(group.trajectory_ids)


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C for the main thread, a moment from now."""

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.1)  # type: ignore[misc]
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_iteration_loses_nothing(start: Start, connect: Connect, interrupt: Callable[[], None]) -> None:
    worker = start(hold=True)
    client = connect(worker)
    group = client.group([1], n=3)
    batch = client.submit(group)
    worker.finish(group.trajectory_ids[0])
    found = []
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        found.extend(t.trajectory_id for t in batch)
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        batch.results()
    assert client.ping().boot_id == "boot-1"
    worker.finish()
    found += [t.trajectory_id for t in batch.results()]
    assert found == list(group.trajectory_ids)


def test_an_interrupted_submit_is_cancelled(start: Start, connect: Connect, interrupt: Callable[[], None]) -> None:
    worker = start(hold=True)
    client = connect(worker, timeout=1.0)
    client.connect()
    worker.refuse(SubmitBatch, None)
    group = client.group([1])
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        client.submit(group, timeout=60)
    worker.wait_for(lambda: worker.of(Cancel))
    assert worker.of(Cancel)[0].trajectory_ids == group.trajectory_ids


def test_a_forked_child_is_told_and_its_own_client_works(start: Start) -> None:
    worker = start(hold=True)
    code = """
        import gc, os, sys
        from rollout.client import ClientClosed, RolloutClient

        client = RolloutClient(sys.argv[1], timeout=10)
        group = client.group([1], n=2)
        batch = client.submit(group)

        def child():
            for call in (client.ping, lambda: next(iter(batch)), lambda: batch.results(timeout=5)):
                try:
                    call()
                except ClientClosed as error:
                    assert str(os.getppid()) in str(error) and str(os.getpid()) in str(error)
                else:
                    return 1
            client.close()
            batch.close()
            with RolloutClient(sys.argv[1], timeout=10) as mine:
                mine.ping()
            return 0

        for leave in (os._exit, sys.exit):
            pid = os.fork()
            if pid == 0:
                code = child()
                batch = client = None
                gc.collect()
                leave(code)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
        client.cancel(trajectory_ids=group.trajectory_ids)
        assert len(batch.results(timeout=10)) == 2
        client.close()
        print("parent fine")
    """
    result = python(code, worker.address)
    assert (result.returncode, result.stdout, result.stderr) == (0, "parent fine\n", "")


def test_an_ack_in_a_forked_child_waits_for_no_thread_of_its_parent(start: Start) -> None:
    code = """
        import os, signal, sys, threading
        from rollout.client import RolloutClient

        client = RolloutClient(sys.argv[1], timeout=10)
        result = next(iter(client.submit(client.group([1]), auto_ack=False)))
        held, done = threading.Event(), threading.Event()

        def hold():
            with client._core._lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        if (pid := os.fork()) == 0:
            signal.alarm(10)
            result.ack()
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        done.set()
        thread.join()
        client.close()
        print(os.waitstatus_to_exitcode(status))
    """
    result = python(code, start().address)
    assert (result.returncode, result.stdout, result.stderr) == (0, "0\n", "")


@pytest.mark.parametrize(
    "ending", ["pass", "raise SystemExit(0)", "del client, batch; gc.collect()", "iter_thread.start()"]
)
def test_the_interpreter_exits_whatever_is_open(start: Start, ending: str) -> None:
    worker = start(hold=True)
    code = f"""
        import gc, sys, threading
        from rollout.client import ClientClosed, RolloutClient

        client = RolloutClient(sys.argv[1])
        batch = client.submit(client.group([1], n=2))

        def iterate():
            try:
                list(batch.events())
            except ClientClosed:
                pass

        iter_thread = threading.Thread(target=iterate, daemon=True)
        absent = RolloutClient("tcp://127.0.0.1:1")
        print("open", flush=True)
        {ending}
    """
    before = time.monotonic()
    result = python(code, worker.address)
    assert (result.returncode, result.stdout) == (0, "open\n"), result.stderr
    assert "Traceback" not in result.stderr
    assert "Assertion" not in result.stderr
    assert time.monotonic() - before < 15
    worker.wait_for(lambda: worker.of(Cancel))  # nothing runs on for nobody


def test_a_client_that_is_dropped_ends_its_thread(start: Start) -> None:
    worker = start()
    client = RolloutClient(worker.address)
    client.ping()
    (thread,) = [t for t in threading.enumerate() if "rollout-client" in t.name]
    del client
    thread.join(10)
    assert not thread.is_alive()


def test_a_thread_that_fails_takes_nobody_along(
    start: Start, connect: Connect, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong in it, waiting ends with the reason."""

    def broken(*_: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr("rollout.client.link.Link.open", broken)
    client = connect("tcp://127.0.0.1:1")
    for call in (client.connect, client.ping, lambda: client.submit(client.group([1]))):
        with pytest.raises(Internal, match="too many open files"):
            later(call).result(10)
    monkeypatch.undo()

    worker = start(hold=True)
    client = connect(worker)
    batch = client.submit(client.group([1]))
    waiting = later(next, iter(batch))
    monkeypatch.setattr("rollout.client.delivery.Delivery.event", broken)
    worker.finish()
    with pytest.raises(Internal, match="I/O thread failed"):
        waiting.result(10)
    with pytest.raises(Internal, match="I/O thread failed"):
        client.ping()


def test_a_batch_keeps_its_client(start: Start) -> None:
    worker = start()
    with RolloutClient(worker.address) as maker:
        group = maker.group([1], n=3)
    assert len([t.trajectory_id for t in RolloutClient(worker.address).submit(group)]) == 3
