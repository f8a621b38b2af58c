"""Procedures under both drivers, and the mailbox between threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from protocols import ConnectionLost, Internal, Timeout
from rollout.client.procedures import Procedures
from rollout.client.waiting import END, Mailbox, Steps, arun, fail, run, settle

DRIVERS: list[Callable[..., Any]] = [run, lambda *args: asyncio.run(arun(*args))]


@pytest.mark.parametrize("drive", DRIVERS)
def test_values_and_errors_reach_the_procedure(drive: Callable[..., Any]) -> None:
    def steps() -> Steps[str]:
        good: Future[int] = Future()
        settle(good, 3)
        value = yield good
        bad: Future[int] = Future()
        fail(bad, Internal("no"))
        try:
            yield bad
        except Internal:
            return f"{value} then caught"
        raise AssertionError

    assert drive(steps()) == "3 then caught"


@pytest.mark.parametrize("drive", DRIVERS)
def test_a_procedure_that_waits_for_nothing(drive: Callable[..., Any]) -> None:
    def steps() -> Steps[int]:
        return 5
        yield Future()

    assert drive(steps()) == 5


@pytest.mark.parametrize("drive", DRIVERS)
def test_time_runs_out_and_the_future_is_told(drive: Callable[..., Any]) -> None:
    future: Future[int] = Future()

    def steps() -> Steps[int]:
        value: int = yield future
        return value

    with pytest.raises(Timeout, match=r"0\.05 s"):
        drive(steps(), 0.05)
    assert future.cancelled()
    settle(future, 1)  # late, and harmless


@pytest.mark.parametrize("drive", DRIVERS)
def test_a_timeout_from_within_keeps_its_words(drive: Callable[..., Any]) -> None:
    def steps() -> Steps[int]:
        future: Future[int] = Future()
        fail(future, Timeout("no reply"))
        value: int = yield future
        return value

    with pytest.raises(Timeout, match="no reply"):
        drive(steps(), 5.0)


@pytest.mark.parametrize("drive", DRIVERS)
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_a_disk_that_timed_out_is_no_wait_that_did(drive: Callable[..., Any], timeout: float | None) -> None:
    """Writing what is pushed can raise it: it is an OSError."""

    def steps() -> Steps[int]:
        future: Future[int] = Future()
        fail(future, TimeoutError(110, "Connection timed out"))
        value: int = yield future
        return value

    with pytest.raises(OSError, match="Connection timed out"):
        drive(steps(), timeout)


def test_a_mailbox_ends_after_the_last_trajectory() -> None:
    mailbox: Mailbox[str] = Mailbox(2)
    mailbox.put("turn", ends_trajectory=False)
    mailbox.put("a", ends_trajectory=True)
    assert [run(mailbox.take()), run(mailbox.take())] == ["turn", "a"]
    assert mailbox.left == 1
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: [run(mailbox.take()), run(mailbox.take())])
        mailbox.put("b", ends_trajectory=True)
        mailbox.wake()
        assert waiting.result(10) == ["b", END]


def test_a_mailbox_gives_items_before_its_error_and_only_that_error_is_cleared() -> None:
    mailbox: Mailbox[str] = Mailbox(2)
    lost, other = ConnectionLost("gone"), Internal("other")
    mailbox.put("a", ends_trajectory=True)
    mailbox.set_error(lost)
    assert run(mailbox.take()) == "a"
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            run(mailbox.take())
    mailbox.clear_error(other)
    with pytest.raises(ConnectionLost):
        run(mailbox.take())
    mailbox.clear_error(lost)
    with pytest.raises(Timeout):
        run(mailbox.take(), 0.02)


def test_items_can_be_taken_out_unseen() -> None:
    mailbox: Mailbox[int] = Mailbox(4)
    for number in range(4):
        mailbox.put(number, ends_trajectory=True)
    assert mailbox.discard(lambda number: number % 2 == 0) == [0, 2]
    assert [run(mailbox.take()) for _ in range(3)] == [1, 3, END]


def test_an_abandoned_wait_takes_no_item_with_it() -> None:
    mailbox: Mailbox[str] = Mailbox(1)

    async def main() -> None:
        waiting = asyncio.ensure_future(arun(mailbox.take()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    mailbox.put("a", ends_trajectory=True)
    assert run(mailbox.take()) == "a"


def test_procedures_run_to_their_end_or_to_the_connections() -> None:
    procedures = Procedures()
    ended: list[object] = []
    future: Future[int] = Future()

    def steps() -> Steps[None]:
        yield procedures.sleep(0.0)
        if (yield future) == 1:
            raise Internal("refused")

    procedures.start(steps(), ended.append)
    procedures.wake(procedures.next_deadline())
    assert not ended
    settle(future, 1)
    assert [type(end) for end in ended] == [Internal]

    future = Future()
    procedures.start(steps(), ended.append)
    procedures.wake(procedures.next_deadline())
    settle(future, 2)
    assert ended[1:] == [None]

    future = Future()
    procedures.start(steps(), ended.append)
    procedures.stop_all()
    assert procedures.next_deadline() == float("inf")
    settle(future, 1)
    assert len(ended) == 2
