"""Calls into one environment, each within its time and checked: whatever comes of one is a value."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

from protocols.errors import Internal, Overloaded, RolloutError, Timeout
from protocols.fields import Truncation
from rollout.environments.answer import End
from rollout.environments.calls import Call, Raised
from rollout.environments.checks import BadAnswer
from rollout.environments.errors import NoProcess, describe

log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")
Stage = Literal["reset", "step", "snapshot", "finish", "close"]
Stops = tuple[asyncio.Future[End], ...]

UNWIND_S = 1.0
"""How long a call that was given up may take to unwind before it is left behind."""
MAX_MESSAGE = 2000
"""Characters of an environment's error that go into the record."""


class Bounded:
    """name: for the log. tool_deadline_s: the trainer's, whose end is no error of a `step`.

    gave_up: a call was given up.
    """

    def __init__(self, name: str, tool_deadline_s: float | None) -> None:
        self.gave_up = False
        self._name = name
        self._tool_deadline_s = tool_deadline_s
        self._left: Call | None = None

    @property
    def busy(self) -> bool:
        """Does a call that was given up still run?"""
        return self._left is not None and self._left.running

    async def call(
        self,
        stage: Stage,
        find: Callable[[], Callable[..., Any]],
        args: tuple[Any, ...],
        check: Callable[[Any], T],
        within: float | None,
        stops: Stops,
        late: asyncio.Future[None] | None = None,
    ) -> T | End:
        """find: the method, for that may raise too. within: seconds; late: ends when they are over, where that is
        watched elsewhere. stops: end the wait early, with their `End`."""
        try:
            call = Call(find(), *args)
        except BaseException as error:
            return self._raised(stage, error)
        waits: set[asyncio.Future[Any]] = {call.task, *stops, *(() if late is None else (late,))}
        try:
            await asyncio.sleep(0)  # most answer at once, and need no timer
            if not call.task.done():
                timeout = within if late is None else None
                await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            call.task.cancel()
            raise
        if not call.task.done():
            await self._leave(stage, call)
            return next((stop.result() for stop in stops if stop.done()), None) or self._late(stage, within)
        outcome = call.task.result()
        if isinstance(outcome, Raised):
            return self._raised(stage, outcome.error)
        return self._checked(stage, outcome.value, check)

    def now(self, stage: Stage, method: Callable[[A], Any], argument: A, check: Callable[[Any], T]) -> T | End:
        """A call of what neither waits nor blocks."""
        try:
            returned = method(argument)
        except BaseException as error:
            return self._raised(stage, error)
        return self._checked(stage, returned, check)

    def _checked(self, stage: Stage, returned: Any, check: Callable[[Any], T]) -> T | End:
        try:
            return check(returned)
        except BadAnswer as error:
            log.warning("%s: %s", self._name, error)
            return _failed(stage, Internal, str(error))
        except BaseException as error:
            # What was returned is the environment's own object, and may itself raise when it is looked at.
            return self._raised(stage, error)

    def _raised(self, stage: Stage, error: BaseException) -> End:
        if isinstance(error, NoProcess):  # counted, and logged where it is about all that wait
            return _failed(stage, Overloaded, str(error))
        log.warning("%s: %s raised", self._name, stage, exc_info=error)
        return _failed(stage, Internal, describe(error))

    async def _leave(self, stage: Stage, call: Call) -> None:
        self.gave_up = True
        call.task.cancel()
        # Cancelled meanwhile, the wait is over and what the trajectory has still becomes its record.
        with suppress(asyncio.CancelledError):
            await asyncio.wait({call.task}, timeout=UNWIND_S)
        if call.running:
            self._left = call
            log.warning("%s: %s was given up but still runs", self._name, stage)

    def _late(self, stage: Stage, within: float | None) -> End:
        log.warning("%s: %s did not return within %s s", self._name, stage, within)
        limit = self._tool_deadline_s
        if stage == "step" and limit is not None:
            return End("tool_deadline", Truncation(limit="tool_deadline_s", value=limit))
        return _failed(stage, Timeout, f"{stage} did not return within {within:g} s")


def _failed(stage: Stage, kind: type[RolloutError], message: str) -> End:
    failure = kind(message[:MAX_MESSAGE], scope="trajectory").failure(stage)
    return End("env_error", failure=failure)
