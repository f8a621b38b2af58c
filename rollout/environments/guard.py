"""One trajectory's environment behind deadlines and checks: whatever it does comes back as a value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protocols.fields import Budget, Record
from rollout.environments.answer import Answer, End
from rollout.environments.base import Context, Environment, EnvironmentSource, Rewards, TurnResult, is_default
from rollout.environments.bounded import Bounded, Stops
from rollout.environments.checks import (
    check_environment,
    check_final,
    check_nothing,
    check_observation,
    check_step,
)
from rollout.environments.deadline import Deadline
from rollout.environments.isolated import Isolated, Kept, StandIn, can_snapshot
from rollout.environments.snapshot import snapshot_of

if TYPE_CHECKING:
    from rollout.chat.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds the worker waits for environment code where the trainer set no deadline of its own."""

    step_s: float = 600.0
    finish_s: float = 600.0
    close_s: float = 5.0
    start_s: float = 120.0
    """Until an environment that does not run in the worker has a process, and is imported there."""


PATIENCE = Patience()


class Guard:
    """`open`, `step`* , `finish`?, `close`. Each returns the checked answer, or the `End` it makes of the trajectory.

    stops: futures that end the wait early, with their `End`.
    """

    def __init__(
        self, name: str, source: EnvironmentSource, *, vocab_size: int, budget: Budget, patience: Patience
    ) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._budget = budget
        self._patience = patience
        self._environment: Environment | None = None
        self._chat: Conversation | None = None
        self._ready = False
        self._calls = Bounded(name, budget.tool_deadline_s)
        self._answer_by: Deadline | None = None
        self._apart = False

    @property
    def ends_when_cut(self) -> bool:
        """Does a turn that was cut end the trajectory?"""
        return (self._budget.on_length or self._made().on_length) == "end"

    @property
    def fixed_turns(self) -> bool:
        return self._made().fixed_turns

    @property
    def stateless(self) -> bool:
        """Is all there is to know of it in the trajectory?"""
        return self._environment is not None and self._environment.stateless

    @property
    def resumable(self) -> bool:
        """Can another environment go on where this one is?"""
        made = self._environment
        return self._ready and not self._lost and made is not None and (made.stateless or can_snapshot(made))

    async def open(self, context: Callable[[], Context], stops: Stops) -> Answer | End:
        """Make the environment and reset it."""
        made = await self._make_one(stops)
        if isinstance(made, End):
            return made
        answer: Answer | End = Answer()
        if not is_default(made, "reset"):
            answer = await self._calls.call(
                "reset",
                lambda: made.reset,
                (self._told(context()),),
                lambda value: check_observation(value, self._vocab_size),
                self._within,
                stops,
            )
        self._ready = not isinstance(answer, End)
        return answer

    async def reopen(self, context: Callable[[], Context], state: dict[str, Any] | None, stops: Stops) -> End | None:
        """Make an environment that goes on from `state`, which `kept` returned.

        None: it was stateless. What its `reset` observes is in the trajectory already.
        """
        if state is None:
            opened = await self.open(context, stops)
            return opened if isinstance(opened, End) else None
        made = await self._make_one(stops)
        if isinstance(made, End):
            return made
        end: End | None = await self._calls.call(
            "reset", lambda: made.restore, (self._told(context()), state), check_nothing, self._within, stops
        )
        self._ready = end is None
        return end

    async def kept(self, since: int, stops: Stops) -> Kept | End:
        """What it takes to go on, where it is `resumable` and no call runs: in one call, wherever it is.

        For `reopen`, and what was said in its conversation after the first `since` messages (`Conversation.said`).
        """
        made, within = self._made(), self._within
        if isinstance(made, StandIn):
            kept: Kept | End = await self._calls.call("snapshot", lambda: made.kept, (since,), _anything, within, stops)
            return kept
        state: dict[str, Any] | None = None
        if not made.stateless:
            taken = await self._calls.call("snapshot", lambda: snapshot_of(made), (), _anything, within, stops)
            if isinstance(taken, End):
                return taken
            state = taken
        return state, () if self._chat is None else self._chat.said(since)

    @property
    def talks(self) -> bool:
        """May something have been said in its conversation?"""
        if isinstance(self._environment, StandIn):
            return self._environment.talks
        return self._chat is not None and self._chat.length > 0

    def _told(self, context: Context) -> Context:
        self._chat = context.chat
        return context

    @property
    def _within(self) -> float:
        return self._budget.tool_deadline_s or self._patience.step_s

    async def _make_one(self, stops: Stops) -> Environment | End:
        source = self._source
        if isinstance(source, Environment):
            self._environment = source
            return source
        if isinstance(source, Isolated):
            # That a process has to start first is not the environment's fault.
            prepare = source.prepare
            prepared = await self._calls.call("reset", lambda: prepare, (), _anything, self._patience.start_s, stops)
            if isinstance(prepared, End):
                return prepared
            source = prepared
        made = await self._calls.call("reset", lambda: source, (), check_environment, self._within, stops)
        if not isinstance(made, End):
            self._environment = made
        return made

    async def step(self, turn: TurnResult, stops: Stops) -> Answer | End:
        environment = self._made()
        if environment.immediate:
            return self._calls.now("step", environment.step, turn, self._check_step)
        within = self._budget.tool_deadline_s or (None if environment.patient else self._patience.step_s)
        late: asyncio.Future[None] | None = None
        if environment.patient:
            # It waits for the trainer, who cannot answer while the trajectory is kept.
            late = over = asyncio.get_running_loop().create_future()
            self._answer_by = Deadline(within, lambda: over.set_result(None))
            if self._apart:
                self._answer_by.stop()
        try:
            return await self._calls.call(
                "step", lambda: environment.step, (turn,), self._check_step, within, stops, late
            )
        finally:
            if self._answer_by is not None:
                self._answer_by.stop()
                self._answer_by = None

    def _check_step(self, returned: Any) -> Answer:
        return check_step(returned, self._vocab_size)

    def part(self) -> None:
        """The trainer gets no questions until `rejoin`: that time counts in none of its deadlines."""
        self._apart = True
        if self._answer_by is not None:
            self._answer_by.stop()

    def rejoin(self) -> None:
        self._apart = False
        if self._answer_by is not None:
            self._answer_by.start()

    @property
    def scores(self) -> bool:
        """Will `finish` be asked? Not before `reset` has returned, nor while a call that was left behind still runs,
        nor where giving one up has cost the environment its process."""
        idle = not self._calls.busy and not self._lost
        return self._ready and idle and not is_default(self._made(), "finish")

    async def finish(self, record: Record, stops: Stops) -> Rewards | End:
        within, environment = self._patience.finish_s, self._made()
        return await self._calls.call("finish", lambda: environment.finish, (record,), check_final, within, stops)

    @property
    def closes(self) -> bool:
        """Is there anything to close?"""
        return self._environment is not None and not is_default(self._environment, "close")

    async def close(self) -> None:
        """Always called, also while a call that was left behind still runs: it may be what ends that call."""
        if self.closes:
            environment = self._made()
            await self._calls.call("close", lambda: environment.close, (), check_nothing, self._patience.close_s, ())

    @property
    def _lost(self) -> bool:
        """Has giving a call up cost the environment its process?"""
        made = self._environment
        return self._calls.gave_up and isinstance(made, StandIn) and made.lost

    def _made(self) -> Environment:
        assert self._environment is not None
        return self._environment


def _anything(returned: Any) -> Any:
    return returned
