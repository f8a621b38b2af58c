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
from rollout.async_engine import AsyncEngine
from rollout.chat.conversation import Conversation
from rollout.chat.format import ChatFormat
from rollout.environments.base import Context, EnvironmentFactory, Rewards, TextCodec
from rollout.environments.guard import PATIENCE, Guard, Patience
from rollout.kv_gate import KvGate
from rollout.mailbox import Mailbox
from rollout.stopwatch import Stopwatch
from rollout.trajectory import End, Trajectory, TrajectorySpec

log = logging.getLogger(__name__)


class Rollout:
    """Runs one trajectory. Made on the event loop. `environment` (Registry.resolve) is called inside `run`.

    on_turn gets each `TurnDone` of a `remote` trajectory; its `id` is empty, for the service to fill in.
    """

    def __init__(
        self,
        spec: TrajectorySpec,
        *,
        engine: AsyncEngine | KvGate,
        environment: EnvironmentFactory,
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

    async def run(self) -> Record:
        """Called once. Never raises: whatever happens becomes the record.

        Cancelled, the task ends without one, except where it waits for a call that was given up or for `close`:
        then only that wait ends.
        """
        watch = Stopwatch(self._spec.accepted)
        watch.queued()
        deadline = self._set_deadline()
        try:
            return await self._conclude(await self._episode(watch), watch)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # Out of a task the last two would end the loop, and with it everyone's trajectories.
            log.exception("%s: the worker failed", self._spec.trajectory_id)
            return self._broken(error, watch)
        finally:
            if deadline is not None:
                deadline.cancel()
            self._mailbox.close()
            with contextlib.suppress(asyncio.CancelledError):
                await self._environment.close()

    def cancel(self, reason: TrajectoryReason) -> None:
        """End with what there is; `run` returns soon. Idempotent, the first reason stays; allowed before `run`."""
        if not self._cancelled.done():
            self._cancelled.set_result(End(reason))
            if self._generating is not None:
                self._engine.abort((self._generating,), "abort_client")

    def answer(self, message: Continue) -> None:
        """The trainer's answer to `turn_done`. Raises PrefixMismatch, UnknownTrajectory, BadRequest."""
        self._mailbox.answer(message)

    @property
    def pending_turn(self) -> TurnDone | None:
        """The `TurnDone` that waits for an answer, to be sent again after a reconnect."""
        return self._mailbox.pending

    async def _episode(self, watch: Stopwatch) -> End:
        try:
            return await self._turns(watch)
        finally:
            self._engine.release_kv(self._trajectory.key)

    async def _turns(self, watch: Stopwatch) -> End:
        trajectory, environment = self._trajectory, self._environment
        if (end := self._stopped()) is not None:
            return end
        answer = await environment.open(self._context, (self._cancelled, self._overdue))
        watch.tool()
        end = answer if isinstance(answer, End) else trajectory.append(answer)
        while end is None:
            if (end := self._stopped() or trajectory.before_turn(self._engine.stats.weight_version)) is not None:
                break
            request = trajectory.request()
            completion = await self._generate(request)
            times = watch.turn(completion.times)
            end = trajectory.take(request, completion, times, ends_when_cut=environment.ends_when_cut)
            if end is not None and STATUS_OF[end.reason] == "failed":
                break
            if (end := self._stopped() or end) is not None:
                break
            answer = await environment.step(trajectory.last_turn(), (self._cancelled, self._overdue))
            trajectory.waited(watch.tool())
            end = answer if isinstance(answer, End) else trajectory.answer(answer, fixed_turns=environment.fixed_turns)
        return end

    async def _generate(self, request: Request) -> Completion:
        seconds = self._spec.group.budget.turn_deadline_s
        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, self._engine.abort, (request.id,), "turn_deadline")
        self._generating = request.id
        try:
            return await self._engine.generate(request)
        finally:
            self._generating = None
            if timer is not None:
                timer.cancel()

    async def _conclude(self, end: End, watch: Stopwatch) -> Record:
        """Score what counts, and make the record."""
        rewards = Rewards()
        if STATUS_OF[end.reason] in ("completed", "truncated") and self._environment.scores:
            draft = self._trajectory.to_record(end, watch.total, watch.wall_s, rewards)
            # The group's metadata is in the records of all its samples.
            draft = draft.model_copy(update={"metadata": copy.deepcopy(draft.metadata)})
            scored = await self._environment.finish(draft, (self._cancelled,))
            watch.tool()
            if isinstance(scored, End):
                end = scored
            else:
                rewards = scored
        return self._trajectory.to_record(end, watch.total, watch.wall_s, rewards)

    def _broken(self, error: BaseException, watch: Stopwatch) -> Record:
        """A fault of our own. What the trajectory holds cannot be trusted, so only its prompt goes back."""
        failure = Internal(f"{type(error).__name__}: {error}", scope="trajectory").failure("generate")
        untouched = Trajectory(self._spec, self._model)
        return untouched.to_record(End("error", failure=failure), watch.total, watch.wall_s, Rewards())

    def _set_deadline(self) -> asyncio.TimerHandle | None:
        seconds = self._spec.group.budget.trajectory_deadline_s
        if seconds is None:
            return None
        end = End("trajectory_deadline", Truncation(limit="trajectory_deadline_s", value=seconds))
        left = seconds if self._spec.accepted is None else self._spec.accepted + seconds - time.monotonic()
        if left <= 0:
            self._overdue.set_result(end)
            return None
        return asyncio.get_running_loop().call_later(left, self._expire, end)

    def _expire(self, end: End) -> None:
        self._overdue.set_result(end)
        if self._generating is not None:
            self._engine.abort((self._generating,), "turn_deadline")

    def _stopped(self) -> End | None:
        return next((stop.result() for stop in (self._cancelled, self._overdue) if stop.done()), None)

    def _context(self) -> Context:
        spec, group = self._spec, self._spec.group
        return Context(
            trajectory_id=spec.trajectory_id,
            group_id=group.id,
            sample_index=spec.sample_index,
            seed=spec.seed,
            prompt=group.prompt.copy(),
            vocab_size=self._model.vocab_size,
            max_context=self._model.max_context,
            ask=self._mailbox.ask,
            metadata=copy.deepcopy(group.metadata),
            config=copy.deepcopy(group.environment.config),
            purpose=group.purpose,
            tokenizer=self._tokenizer,
            chat=self._conversation(),
        )

    def _conversation(self) -> Conversation | None:
        group = self._spec.group
        if self._chat is None or group.messages is None:
            return None
        form = self._chat.form(group.tools, group.template.options)
        return Conversation(form, copy.deepcopy(group.messages), group.prompt, group.template)
