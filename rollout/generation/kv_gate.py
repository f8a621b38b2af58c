"""The engine as trajectories see it where their KV is budgeted: a turn for which there is no room yet waits here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from engine.handle import EngineStats
from engine.request import Completion, FinishReason, Request
from engine.scheduling.kv_holds import LONG_WAIT
from rollout.generation.async_engine import AsyncEngine
from rollout.generation.kv_budget import KvBudget


@dataclass(slots=True, eq=False)
class Turn:
    """A turn that waits for room. ended: it is over before it could start."""

    request: Request
    room: asyncio.Future[None]
    ended: Completion | None = None


class KvGate:
    """What a `Rollout` needs of an `AsyncEngine`, and the same to it.

    on_room: called when trajectories may have become able to start. One that was not started through the budget
    passes as if there were no gate.
    """

    def __init__(self, engine: AsyncEngine, budget: KvBudget, on_room: Callable[[], None]) -> None:
        self._engine = engine
        self._budget = budget
        self._on_room = on_room
        self._waiting: dict[str, Turn] = {}
        self._away: dict[Hashable, asyncio.TimerHandle] = {}
        budget.on_start = self._soon_away

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
        self._here(key)
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
            else:
                self._soon_away(key)
        self.wake()
        return completion

    def abort(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        for request_id in request_ids:
            if (turn := self._waiting.get(request_id)) is None:
                self._engine.abort((request_id,), reason)
                continue
            # It may have been given its room already, and not have come to take it.
            turn.ended = turn.ended or _unstarted(turn.request, reason)
            if not turn.room.done():
                turn.room.set_result(None)

    def release_kv(self, key: str) -> None:
        """See `AsyncEngine.release_kv`."""
        self._here(key)
        self._engine.release_kv(key)
        if key in self._budget:
            self._budget.leave(key)
        self._on_room()
        self.wake()

    def wake(self) -> None:
        """Let turns go on for which there is room by now, those of the oldest trajectories first."""
        waiting = [turn for turn in self._waiting.values() if not turn.room.done()]
        for turn in sorted(waiting, key=lambda turn: self._budget.place(turn.request.trajectory)):
            if self._engine.died is None and not self._budget.may_go_on(turn.request.trajectory):
                break
            turn.room.set_result(None)

    async def _room(self, request: Request) -> Completion | None:
        """Until there is room, or the end of the request, which then did not start."""
        turn = self._waiting[request.id] = Turn(request, asyncio.get_running_loop().create_future())
        try:
            await turn.room
            return turn.ended
        finally:
            del self._waiting[request.id]

    def _soon_away(self, key: Hashable) -> None:
        self._here(key)
        self._away[key] = asyncio.get_running_loop().call_later(LONG_WAIT, self._stays_away, key)

    def _here(self, key: Hashable) -> None:
        """Its environment has it no longer."""
        if (timer := self._away.pop(key, None)) is not None:
            timer.cancel()

    def _stays_away(self, key: Hashable) -> None:
        """Nobody may wait for an environment that itself waits for others to start, as one may that steps together."""
        del self._away[key]
        if key in self._budget:
            self._budget.stays_away(key)
            self._on_room()
            self.wake()


def _unstarted(request: Request, reason: FinishReason) -> Completion:
    logprobs = dict.fromkeys(request.logprob_modes, np.empty(0, np.float32))
    return Completion(request.id, reason, np.empty(0, np.int32), logprobs)
