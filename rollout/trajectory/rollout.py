"""One trajectory, run: prompt, turns, environment, record."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import Callable

from engine.request import Completion, Request
from protocols.errors import Internal
from protocols.fields import STATUS_OF, ModelInfo, Record, TrajectoryReason, Truncation
from protocols.replies import TurnDone
from protocols.requests import Continue
from rollout.chat.format import ChatFormat
from rollout.environments.answer import Answer, End
from rollout.environments.base import Context, EnvironmentSource, Rewards, TextCodec
from rollout.environments.deadline import Deadline
from rollout.environments.guard import PATIENCE, Guard, Patience
from rollout.generation.async_engine import AsyncEngine
from rollout.generation.kv_gate import KvGate
from rollout.trajectory.context import context_of
from rollout.trajectory.mailbox import Mailbox
from rollout.trajectory.spec import TrajectorySpec
from rollout.trajectory.state import State
from rollout.trajectory.stopwatch import Stopwatch
from rollout.trajectory.trajectory import Trajectory

log = logging.getLogger(__name__)

CLOSE_S = 0.05
"""How long a record waits for its environment's `close`."""


class Rollout:
    """Runs one trajectory. Made on the event loop. What makes an environment (Registry.resolve) is called in `run`.

    on_turn gets each `TurnDone` of a `remote` trajectory; its `id` is empty, for the service to fill in.
    """

    def __init__(
        self,
        spec: TrajectorySpec,
        *,
        engine: AsyncEngine | KvGate,
        environment: EnvironmentSource,
        model: ModelInfo,
        on_turn: Callable[[TurnDone], None],
        tokenizer: TextCodec | None = None,
        chat: ChatFormat | None = None,
        patience: Patience = PATIENCE,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._spec = spec
        self._engine = engine
        self._model = model
        self._tokenizer = tokenizer
        self._chat = chat
        self._trajectory = Trajectory(spec, model)
        self._mailbox = Mailbox(spec.trajectory_id, model.vocab_size, on_turn)
        self._environment = Guard(
            spec.trajectory_id,
            environment,
            vocab_size=model.vocab_size,
            budget=spec.group.budget,
            patience=patience,
        )
        self._cancelled: asyncio.Future[End] = loop.create_future()
        self._overdue: asyncio.Future[End] = loop.create_future()
        self._generating: str | None = None
        self._deadline = Deadline(self._seconds_left(), self._expire)
        self._over = False
        self._on_rest: Callable[[], None] | None = None
        self._parked: asyncio.Future[None] | None = None
        self._state = State(spec, self._environment, model.max_context)
        self._watch = Stopwatch(spec.accepted)
        self.closing: asyncio.Task[None] | None = None
        """The end of the environment, which may take longer than `run`."""

    async def run(self) -> Record:
        """Called once. Never raises: whatever happens becomes the record.

        Cancelled, the task ends without one, except where it waits for a call that was given up or for `close`:
        then only that wait ends.
        """
        self._watch.queued()
        try:
            record = await self._conclude(await self._episode())
            await self._while_parked()
            return record
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # Out of a task the last two would end the loop, and with it everyone's trajectories.
            log.exception("%s: the worker failed", self._spec.trajectory_id)
            return self._broken(error)
        finally:
            self._over = True
            self._deadline.end()
            self._mailbox.close()
            await self._close()

    def cancel(self, reason: TrajectoryReason, truncation: Truncation | None = None) -> None:
        """End with what there is; `run` returns soon. Idempotent, the first reason stays; allowed before `run`."""
        if not self._cancelled.done():
            self._cancelled.set_result(End(reason, truncation))
            if self._generating is not None:
                self._engine.abort((self._generating,), "abort_client")

    def park(self, on_rest: Callable[[], None]) -> None:
        """Go no further until `unpark`. A turn that is being sampled is broken off, and `on_rest` called when what it
        has is here; an environment that is at work goes on working. One that ends before that never rests."""
        if self._over:
            return
        self._on_rest = on_rest
        self._parked = asyncio.get_running_loop().create_future()
        self._deadline.stop()
        self._environment.part()
        if self._generating is None:
            self._rest()
        else:
            self._engine.abort((self._generating,), "abort_client")

    def unpark(self) -> None:
        """Go on; the time since `park` counts in no deadline."""
        parked, self._parked = self._parked, None
        if parked is not None:
            self._deadline.start()
            self._environment.rejoin()
            parked.set_result(None)

    def so_far(self, reason: TrajectoryReason) -> Record:
        """What its record would be if it ended now."""
        times, wall_s = self._watch.total, self._watch.wall_s
        return self._trajectory.to_record(End(reason), times, wall_s, Rewards(), self._state.partial(self._trajectory))

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._trajectory.length

    def answer(self, message: Continue) -> bool:
        """The trainer's answer to `turn_done`; False where it came too late.

        Raises PrefixMismatch, UnknownTrajectory, BadRequest.
        """
        return self._mailbox.answer(message)

    @property
    def pending_turn(self) -> TurnDone | None:
        """The `TurnDone` that waits for an answer, to be sent again after a reconnect."""
        return self._mailbox.pending

    async def _episode(self) -> End:
        try:
            return await self._turns()
        finally:
            self._engine.release_kv(self._trajectory.key)

    async def _turns(self) -> End:
        trajectory, environment = self._trajectory, self._environment
        if (end := self._stopped()) is not None:
            return end
        end = await self._open()
        if end is None and trajectory.unanswered:
            end = trajectory.ended(ends_when_cut=environment.ends_when_cut)
        self._watch.tool()
        while end is None:
            await self._while_parked()
            if (end := self._stopped()) is not None:
                break
            if not trajectory.unanswered:
                if (end := trajectory.before_turn(self._engine.stats.weight_version)) is not None:
                    break
                request = trajectory.request()
                completion = await self._generate(request)
                times = self._watch.turn(completion.times)
                end = trajectory.take(request, completion, times, ends_when_cut=environment.ends_when_cut)
                if end is not None and STATUS_OF[end.reason] == "failed":
                    break
                if end is None or (end.reason == "abort_client" and not self._cancelled.done()):
                    self._rest()
                    if trajectory.cut and self._parked is not None:
                        end = None
                        continue
                if (end := self._stopped() or end) is not None:
                    break
            answer = await self._answer()
            trajectory.waited(self._watch.tool())
            end = answer if isinstance(answer, End) else trajectory.answer(answer, fixed_turns=environment.fixed_turns)
        return end

    async def _open(self) -> End | None:
        trajectory, environment = self._trajectory, self._environment
        if trajectory.begun:
            return await environment.reopen(self._context, self._state.snapshot, self._stops)
        answer = await environment.open(self._context, self._stops)
        if isinstance(answer, End):
            return answer
        return await self._state.keep(self._stops) or trajectory.append(answer)

    async def _answer(self) -> Answer | End:
        """What the environment says to the last turn; its state is kept with that."""
        answer = await self._environment.step(self._trajectory.last_turn(), self._stops)
        if isinstance(answer, End) or answer.done:
            return answer
        return await self._state.keep(self._stops) or answer

    def _rest(self) -> None:
        on_rest, self._on_rest = self._on_rest, None
        if on_rest is not None:
            self._engine.release_kv(self._trajectory.key)
            on_rest()

    async def _while_parked(self) -> None:
        # Where `on_rest` is still to be called, the turn that was to be broken off has ended the trajectory instead.
        while self._parked is not None and self._on_rest is None and not self._cancelled.done():
            await asyncio.wait((self._parked, self._cancelled), return_when=asyncio.FIRST_COMPLETED)
            self._watch.paused()

    async def _close(self) -> None:
        """A slow one goes on closing on its own: nobody waits for its record until then."""
        if not self._environment.closes:
            return
        self.closing = asyncio.get_running_loop().create_task(self._environment.close())
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((self.closing,), timeout=CLOSE_S)

    async def _generate(self, request: Request) -> Completion:
        seconds = self._spec.group.budget.turn_deadline_s
        timer = None
        if seconds is not None:
            seconds = max(0.0, seconds - self._trajectory.spent_s)
            timer = asyncio.get_running_loop().call_later(seconds, self._engine.abort, (request.id,), "turn_deadline")
        self._generating = request.id
        try:
            return await self._engine.generate(request)
        finally:
            self._generating = None
            if timer is not None:
                timer.cancel()

    async def _conclude(self, end: End) -> Record:
        """Score what counts, and make the record."""
        rewards = Rewards()
        if STATUS_OF[end.reason] in ("completed", "truncated") and self._environment.scores:
            draft = self._trajectory.to_record(end, self._watch.total, self._watch.wall_s, rewards)
            # The group's metadata is in the records of all its samples.
            draft = draft.model_copy(update={"metadata": copy.deepcopy(draft.metadata)})
            scored = await self._environment.finish(draft, (self._cancelled,))
            self._watch.tool()
            if isinstance(scored, End):
                end = scored
            else:
                rewards = scored
        partial = self._state.partial(self._trajectory)
        return self._trajectory.to_record(end, self._watch.total, self._watch.wall_s, rewards, partial)

    def _broken(self, error: BaseException) -> Record:
        """A fault of our own. What the trajectory holds cannot be trusted, so only its prompt goes back."""
        failure = Internal(f"{type(error).__name__}: {error}", scope="trajectory").failure("generate")
        untouched = Trajectory(self._spec, self._model)
        return untouched.to_record(End("error", failure=failure), self._watch.total, self._watch.wall_s, Rewards())

    def _seconds_left(self) -> float | None:
        """Of `trajectory_deadline_s`, now."""
        seconds, accepted = self._spec.group.budget.trajectory_deadline_s, self._spec.accepted
        if seconds is None:
            return None
        before = 0.0 if self._spec.before is None else self._spec.before.wall_s
        return seconds - before - (0.0 if accepted is None else time.monotonic() - accepted)

    def _expire(self) -> None:
        seconds = self._spec.group.budget.trajectory_deadline_s or 0.0
        self._overdue.set_result(End("trajectory_deadline", Truncation(limit="trajectory_deadline_s", value=seconds)))
        if self._generating is not None:
            self._engine.abort((self._generating,), "turn_deadline")

    @property
    def _stops(self) -> tuple[asyncio.Future[End], ...]:
        return self._cancelled, self._overdue

    def _stopped(self) -> End | None:
        return next((stop.result() for stop in self._stops if stop.done()), None)

    def _context(self) -> Context:
        ask = self._mailbox.ask
        return context_of(self._spec, self._model, ask=ask, tokenizer=self._tokenizer, chat=self._chat)
