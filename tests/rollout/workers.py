"""Workers for tests: on a thread of this process over a timed engine, or as a command of their own."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from protocols.fields import Limits, ModelInfo
from rollout.environments.registry import Registry
from rollout.metrics.observer import Observer
from rollout.service.service import Served, Service, Timeouts
from rollout.wire.channel import Channel
from tests.rollout.timed_engine import VOCAB, TimedEngine

LIMITS = Limits()
TIMEOUTS = Timeouts(client=20.0, drain=1.0, ack=1.0)
ROOT = Path(__file__).parent.parent.parent


def served(*, max_context: int = 16384, env: tuple[str, ...] = ()) -> Served:
    model = ModelInfo(architecture="stub", dtype="float32", vocab_size=VOCAB, max_context=max_context)
    return Served(model, 0, "stub:start", Registry.load(env))


class WorkerThread:
    """A service over `engine` on a thread. `call` runs a function on its loop and returns what it returns."""

    def __init__(
        self,
        engine: TimedEngine,
        *,
        address: str = "tcp://127.0.0.1:0",
        limits: Limits = LIMITS,
        timeouts: Timeouts = TIMEOUTS,
        at_once: int = 1024,
        max_waiting: int = 65536,
        heartbeat_timeout: float = 60.0,
        what: Served | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.engine = engine
        self._channel = Channel(address, max_frame=limits.max_frame, heartbeat_timeout=heartbeat_timeout)
        self.address = self._channel.address
        self._make: Callable[[], Service] = lambda: Service(
            self._channel,
            engine,
            what or served(),
            limits=limits,
            timeouts=timeouts,
            at_once=at_once,
            max_waiting=max_waiting,
            observer=observer,
        )
        self._ready = threading.Event()
        self.alive: bool | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service = self._make()
        self.alive = await self.service.run(self._ready.set)

    def start(self) -> WorkerThread:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def call(self, function: Callable[[Service], Any]) -> Any:
        done: asyncio.Future[Any] = asyncio.run_coroutine_threadsafe(self._call(function), self.loop)  # type: ignore[assignment]
        return done.result(10)  # type: ignore[call-arg]

    async def _call(self, function: Callable[[Service], Any]) -> Any:
        return function(self.service)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.service.stop)
        self.join()

    def join(self, timeout: float = 15.0) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive()


@contextmanager
def worker(engine: TimedEngine | None = None, **options: Any) -> Iterator[WorkerThread]:
    thread = WorkerThread(engine or TimedEngine(), **options).start()
    try:
        yield thread
    finally:
        thread.stop()


P = ParamSpec("P")


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a coroutine function as a test."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


async def soon(condition: Callable[[], bool]) -> None:
    """Let the loop work until something that nobody announces is so; `on_loop` bounds the wait."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("it never happened")
        time.sleep(0.01)


class WorkerProcess:
    """`python -m <module>` with a ready file in `folder`; what it prints and logs is kept there.

    elsewhere: start it as a console script would be, from `folder` and without a look there for modules.
    """

    def __init__(self, module: str, *arguments: str, folder: Path, ipc: bool = False, elsewhere: bool = False) -> None:
        bind = f"ipc://{folder}/worker.ipc" if ipc else "tcp://127.0.0.1:0"
        self._ready_file = folder / "ready.json"
        self._ready_file.unlink(missing_ok=True)
        self._log = (folder / "worker.log").open("w+")
        ready = ("--bind", bind, "--ready-file", str(self._ready_file))
        self.process = subprocess.Popen(
            [sys.executable, *(["-P"] if elsewhere else []), "-m", module, *ready, *arguments],
            cwd=folder if elsewhere else ROOT,
            env=os.environ | ({"PYTHONPATH": str(ROOT)} if elsewhere else {}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_ready(self, timeout: float = 60.0) -> WorkerProcess:
        eventually(lambda: self._ready_file.exists() or self.process.poll() is not None, timeout)
        assert self._ready_file.exists(), self.log
        self.address = str(json.loads(self._ready_file.read_text())["address"])
        return self

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 20.0) -> int:
        return self.process.wait(timeout)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()
