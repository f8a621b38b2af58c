# ruff: noqa: ASYNC240
"""Processes that cannot be started: who waits is told why, in time, and served when they can be again."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollout.environments import stock
from rollout.environments.nursery import Nursery
from rollout.environments.pool import NoProcess, Pool
from tests.rollout.build import run
from tests.rollout.environments import foreign
from tests.rollout.workers import soon

REFUSING = """
import os
from pathlib import Path

def refuse(fork=os.fork):
    if Path({flag!r}).exists() and (os.getppid() != {worker}) == {inner}:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = refuse
"""


def with_pool(main: Callable[[Pool], Awaitable[None]]) -> None:
    async def body() -> None:
        pool = Pool(3, "tests")
        try:
            await main(pool)
        finally:
            await pool.close()

    run(body())


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "RETRY_S", 0.05)


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture(params=[False, True], ids=["in the nursery", "in the warden"])
def flag(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While it exists the system refuses to fork, in one of the two places where that is done."""
    import os

    flag = tmp_path / "refuse"
    code = REFUSING.format(flag=str(flag), worker=os.getpid(), inner=request.param)
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return flag


@pytest.mark.usefixtures("hasty")
def test_a_fork_that_is_refused_is_tried_again_and_said_once(flag: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main(pool: Pool) -> None:
        flag.touch()
        calls = [asyncio.ensure_future(pool.call(foreign.add, (i, 1), wait=60.0)) for i in range(3)]
        leases = [asyncio.ensure_future(pool.lease(60.0)) for _ in range(2)]
        await soon(lambda: pool._stock._refusals >= 3)
        with pytest.raises(NoProcess, match=r"within 0\.01 s: none can be started \(.*Resource temporarily unavail"):
            await pool.call(foreign.add, (1, 1), wait=0.01)
        with pytest.raises(NoProcess, match="none can be started"):
            await pool.lease(0.01)
        assert (pool.stats.unserved_total, pool.stats.calls_waiting, pool.stats.deaths_total) == (2, 3, 0)
        flag.unlink()
        assert await asyncio.gather(*calls) == [1, 2, 3]
        for process in await asyncio.gather(*leases):
            pool.release(process)
        assert not pool._stock.refused

    with_pool(main)
    (said,) = refusals(caplog)
    assert "no process of tests can be started" in said
    assert "Resource temporarily unavailable" in said
    assert sum("started again, after" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.usefixtures("hasty")
def test_who_can_share_or_wait_for_one_that_is_there_does(flag: Path) -> None:
    async def main(pool: Pool) -> None:
        leased = await pool.lease()
        flag.touch()
        assert await pool.lease(60.0) is leased
        waiting = asyncio.ensure_future(pool.call(foreign.add, (1, 1), wait=60.0))
        await soon(lambda: bool(pool._stock.refused))
        pool.release(leased)
        pool.release(leased)
        assert await waiting == 2

    with_pool(main)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("how", ["no interpreter", "no descriptor", "one that ends at once", "it cannot be reached"])
def test_a_broken_machine_is_said_by_name_and_may_be_mended(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async def main(pool: Pool) -> None:
        with monkeypatch.context() as broken:
            match how:
                case "no interpreter":
                    broken.setattr(sys, "executable", "/nowhere/python")
                case "no descriptor":
                    broken.setattr(socket, "socketpair", fail)
                case "one that ends at once":
                    broken.setattr(sys, "executable", "/bin/true")
                case "it cannot be reached":
                    broken.setattr(Nursery, "start", fail)
            why = {"no interpreter": "No such file", "one that ends at once": "gone|Broken pipe"}.get(how, "Too many")
            with pytest.raises(NoProcess, match=f"none can be started .*({why})"):
                await pool.call(foreign.add, (1, 1), wait=0.3)
            with pytest.raises(NoProcess, match="none can be started"):
                await pool.lease(0.3)
        assert await pool.call(foreign.add, (1, 1), wait=30.0) == 2

    with_pool(main)
