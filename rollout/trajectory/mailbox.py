"""Between a trajectory that asks the trainer and the trainer's `continue`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from protocols.errors import BadRequest, PrefixMismatch, UnknownTrajectory
from protocols.replies import TurnDone
from protocols.requests import Continue
from rollout.environments.base import TurnResult
from rollout.environments.checks import outside_of


class Mailbox:
    """One question at a time, each answered once: a repeat of an answer is taken for what it is, a repeat."""

    def __init__(self, trajectory_id: str, vocab_size: int, on_turn: Callable[[TurnDone], None]) -> None:
        self._trajectory_id = trajectory_id
        self._vocab_size = vocab_size
        self._on_turn = on_turn
        self._taken: dict[int, Continue] = {}
        self._answer: asyncio.Future[Continue] | None = None
        self._closed = False
        self._asked = -1
        self.pending: TurnDone | None = None
        """The question that waits."""

    async def ask(self, turn: TurnResult) -> Continue:
        """Raises RuntimeError when a question waits already, or this turn was asked about before."""
        if self.pending is not None or turn.index in self._taken:
            raise RuntimeError("the trainer is asked about each turn once")
        self._answer = asyncio.get_running_loop().create_future()
        self._asked = turn.index
        self.pending = TurnDone(
            id="",
            trajectory_id=self._trajectory_id,
            turn=turn.turn,
            total_len=turn.total_len,
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
        )
        self._on_turn(self.pending)
        try:
            return await self._answer
        finally:
            self.pending = None

    def answer(self, message: Continue) -> bool:
        """False: it comes too late, for nobody waits for it any more.

        Raises PrefixMismatch, UnknownTrajectory (it has ended), BadRequest (an id that the model lacks).
        """
        message = message.model_copy(update={"id": "continue"})
        if (before := self._taken.get(message.turn)) is not None:
            if before == message:
                return True
            raise PrefixMismatch(f"turn {message.turn} was already answered otherwise", field="turn")
        if self._answer is not None and self._answer.cancelled() and message.turn == self._asked:
            return False
        if self._closed:
            raise UnknownTrajectory(f"trajectory {self._trajectory_id!r} has ended", field="trajectory_id")
        if self.pending is None or self._answer is None:
            raise PrefixMismatch("no turn waits for an answer", field="turn")
        if message.turn != self.pending.turn.index:
            raise PrefixMismatch(f"turn {self.pending.turn.index} waits for an answer", field="turn")
        if message.expected_len != self.pending.total_len:
            raise PrefixMismatch(f"the trajectory has {self.pending.total_len} tokens", field="expected_len")
        for name, ids in (("glue", message.glue), ("observation", message.observation)):
            self._check(name, ids)
        self._taken[message.turn] = message
        self.pending = None
        self._answer.set_result(message)
        return True

    def close(self) -> None:
        """The trajectory has ended; only repeats are still taken."""
        self._closed = True
        self.pending = None

    def _check(self, name: str, ids: np.ndarray | None) -> None:
        if ids is not None and (at := outside_of(ids, self._vocab_size)) is not None:
            raise BadRequest(f"{ids[at]} is outside of the vocabulary of {self._vocab_size} ids", field=f"{name}[{at}]")
