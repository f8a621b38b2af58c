"""The engine in a thread: the default on the CPU, and in tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from engine.engine import Engine
from engine.handle import Command, Report
from engine.handles.loop import Close, EngineLoop, Inbox
from engine.step import WeightStore


class ThreadEngine:
    """`EngineHandle` around an engine that no other thread touches from `start` on."""

    def __init__(self, engine: Engine, weights: WeightStore) -> None:
        self._engine = engine
        self._weights = weights
        self._inbox: Inbox = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, deliver: Callable[[Report], None]) -> None:
        """`deliver` runs on the engine's thread and must not block; called once."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        loop = EngineLoop(self._engine, self._weights, self._inbox, deliver)
        self._thread = threading.Thread(target=loop.run, name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        self._inbox.put(command)

    def close(self, timeout: float) -> bool:
        if not self._closed:
            self._closed = True
            self._inbox.put(Close())
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()
