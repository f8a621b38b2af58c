"""Requests that wait for their reply, in the order they were made, and whoever waits for the welcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from protocols.errors import RolloutError
from protocols.replies import Welcome
from protocols.requests import RequestMessage
from rollout.client.ledger import Submitted
from rollout.client.waiting import fail, settle


@dataclass(slots=True, eq=False)
class Pending:
    """deadline: by the monotonic clock, `timeout` seconds after it was made. batch: of a submit. turn: of a
    `continue`, the trajectory and the submit that the answered turn belongs to. internal: made by the I/O thread
    for one connection, and forgotten with it."""

    message: RequestMessage
    frames: Sequence[bytes | memoryview]
    future: Future[Any]
    deadline: float
    timeout: float
    batch: Submitted | None = None
    turn: tuple[str, str] | None = None
    internal: bool = False
    sent_before: bool = False


GRAIN_S = 0.05
"""How often it is looked whose time is up: with thousands of requests on their way, not at each of them."""


class PendingTable:
    def __init__(self) -> None:
        self._by_id: dict[str, Pending] = {}
        self._look_at = 0.0

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._by_id.values()))

    def add(self, pending: Pending) -> None:
        self._by_id[pending.message.id] = pending

    def take(self, request_id: str) -> Pending | None:
        return self._by_id.pop(request_id, None)

    def take_all(self) -> list[Pending]:
        pending, self._by_id = list(self._by_id.values()), {}
        return pending

    def connection_lost(self) -> None:
        self._by_id = {name: pending for name, pending in self._by_id.items() if not pending.internal}

    def take_expired(self, now: float) -> list[Pending]:
        """Those whose time is up or whose waiter has gone."""
        if now < self._look_at:
            return []
        self._look_at = now + GRAIN_S
        expired = [p for p in self._by_id.values() if p.deadline <= now or p.future.cancelled()]
        for pending in expired:
            del self._by_id[pending.message.id]
        return expired

    def next_deadline(self) -> float:
        return self._look_at if self._by_id else float("inf")


class Greeted:
    """Futures that the first welcome settles, each with the seconds that it may take."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, float, Future[Welcome]]] = []

    def add(self, future: Future[Welcome], timeout: float) -> None:
        self._waiting.append((time.monotonic() + timeout, timeout, future))

    def settle(self, welcome: Welcome) -> None:
        for _, _, future in self._waiting:
            settle(future, welcome)
        self._waiting.clear()

    def fail(self, error: Callable[[float], RolloutError], now: float = float("inf")) -> None:
        """Those whose time is up; without `now`, all. error: after so many seconds."""
        for _, timeout, future in (entry for entry in self._waiting if entry[0] <= now):
            fail(future, error(timeout))
        self._waiting = [entry for entry in self._waiting if entry[0] > now]

    def next_deadline(self) -> float:
        return min((deadline for deadline, _, _ in self._waiting), default=float("inf"))
