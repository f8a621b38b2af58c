"""The engine as trajectories see it where their KV is budgeted: a turn for which there is no room yet waits here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import numpy as np

from engine.handle import EngineStats
from engine.request import Completion, FinishReason, Request
from rollout.async_engine import AsyncEngine
from rollout.kv_budget import KvBudget


class KvGate:
    """What a `Rollout` needs of an `AsyncEngine`, and the same to it.

    on_room: called when trajectories may have become able to start. One that was not started through the budget
    passes as if there were no gate.
    """

    def __init__(self, engine: AsyncEngine, budget: KvBudget, on_room: Callable[[], None]) -> None:
        self._engine = engine
        self._budget = budget
        self._on_room = on_room
        self._waiting: dict[str, tuple[Request, asyncio.Future[Completion | None]]] = {}

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def num_waiting(self) -> int:
        """Turns that wait for room."""
        return len(self._waiting)

    async def generate(self, request: Request) -> Completion:
        """See `AsyncEngine.generate`; the wait for room is part of it."""
        key = request.trajectory
        if key not in self._budget:
            return await self._engine.generate(request)
        self._budget.grew(key, len(request.token_ids))
        if not self._budget.may_go_on(key) and (ended := await self._room(request)) is not None:
            return ended
        completion = await self._engine.generate(request)
        if key in self._budget:
            length = len(request.token_ids) + len(completion.token_ids)
            if self._budget.grew(key, length, request.expected_wait):
                self._on_room()
        self.wake()
        return completion

    def abort(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        for request_id in request_ids:
            if request_id in self._waiting:
                request, room = self._waiting.pop(request_id)
                room.set_result(_unstarted(request, reason))
            else:
                self._engine.abort((request_id,), reason)

    def release_kv(self, key: str) -> None:
        """See `AsyncEngine.release_kv`."""
        self._engine.release_kv(key)
        if key in self._budget:
            self._budget.leave(key)
        self._on_room()
        self.wake()

    def wake(self) -> None:
        """Let turns go on for which there is room by now, those of the oldest trajectories first."""
        for request, room in sorted(self._waiting.values(), key=lambda waiting: waiting[0].order):
            if self._engine.died is None and not self._budget.may_go_on(request.trajectory):
                break
            del self._waiting[request.id]
            room.set_result(None)

    async def _room(self, request: Request) -> Completion | None:
        """Until there is room, or the end of the request, which then did not start."""
        room: asyncio.Future[Completion | None] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = request, room
        try:
            return await room
        finally:
            self._waiting.pop(request.id, None)


def _unstarted(request: Request, reason: FinishReason) -> Completion:
    logprobs = dict.fromkeys(request.logprob_modes, np.empty(0, np.float32))
    return Completion(request.id, reason, np.empty(0, np.int32), logprobs)
