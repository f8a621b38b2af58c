"""One trajectory as a pure state machine: tokens, budgets, turns; no engine, no clock, no asyncio.

    append? -> before_turn -> request -> take -> answer -> before_turn -> ... -> to_record

A step that may end the trajectory returns its `End`, or None to go on. Nothing is taken back: a later turn extends
the ids of the earlier ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.request import Completion, Failure, Request
from protocols import fields
from protocols.fields import (
    SOURCE_GLUE,
    SOURCE_OBSERVATION,
    SOURCE_PREFIX,
    STATUS_OF,
    ModelInfo,
    Record,
    TrajectoryReason,
    Truncation,
    Turn,
)
from rollout.environments.answer import Answer, End
from rollout.environments.base import Rewards, TurnResult
from rollout.generation.failures import wire_error
from rollout.trajectory.bounds import Bounds
from rollout.trajectory.sampling import engine_params, stop_rule
from rollout.trajectory.segments import MAX_SEGMENTS, Segments
from rollout.trajectory.spec import TrajectorySpec
from rollout.trajectory.tokens import Tokens, fault
from rollout.trajectory.turns import ABORTED, MAX_TURNS, add_times, gone_on, turn_of


class Trajectory:
    """What one trajectory consists of so far, and whether it may go on. `length`: of the segment that grows."""

    def __init__(self, spec: TrajectorySpec, model: ModelInfo) -> None:
        self._spec = spec
        self._sampling = spec.group.sampling
        self._budget = spec.group.budget
        self._stop = stop_rule(self._sampling, model.eos_ids)
        self._bounds = Bounds(self._budget, model.max_context)
        self._segments = Segments(self._sampling.logprobs, spec.group.prompt, spec.group.prompt_source)
        self._turn_limit = self._sampling.max_tokens
        self._turns: list[Turn] = []
        self._answered = True
        if spec.before is not None and spec.before.partial is not None:
            self._segments.restore(spec.before.segments)
            self._turns += (turn for segment in spec.before.segments for turn in segment.turns)
            self._turn_limit = spec.before.partial.max_tokens
            self._answered = spec.before.partial.answered

    @property
    def length(self) -> int:
        return self._tokens.length

    @property
    def key(self) -> str:
        """`Request.trajectory` of its turns."""
        return f"{self._spec.session}/{self._spec.trajectory_id}"

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return sum(turn.length for turn in self._turns)

    @property
    def begun(self) -> bool:
        """Is there more than the prompt?"""
        return bool(self._turns) or self.length > len(self._spec.group.prompt)

    @property
    def spent_s(self) -> float:
        """Seconds that the turn to be gone on with has taken already."""
        times = self._turns[-1].times if self.cut else None
        return 0.0 if times is None else times.queue + times.prefill + times.decode + times.preempted

    @property
    def cut(self) -> bool:
        """Was the last turn broken off? Then the next request goes on with it."""
        return not self._answered and self._turns[-1].finish_reason in ABORTED

    @property
    def unanswered(self) -> bool:
        """Has the last turn ended by itself, and not been answered?"""
        return not self._answered and not self.cut

    def append(self, answer: Answer) -> End | None:
        """Add what comes before a turn, glue first: all of it or, where it does not fit, nothing. An exact fit fits.

        `max_tokens` is the budget of the turn that it opens; None is `Sampling.max_tokens`.
        """
        parts = [
            (ids, source)
            for ids, source in (
                (answer.branch, SOURCE_PREFIX),
                (answer.glue, SOURCE_GLUE),
                (answer.observation, SOURCE_OBSERVATION),
                (answer.opening, SOURCE_GLUE),
            )
            if ids is not None
        ]
        room = self._room() if answer.branch is None else self._bounds.tokens
        if sum(len(ids) for ids, _ in parts) > room:
            return self._bounds.overflow()
        if answer.branch is not None:
            if self._segments.index + 1 == MAX_SEGMENTS:
                return End("length", Truncation(limit="max_segments", value=MAX_SEGMENTS))
            self._segments.branch(len(self._turns))
        for ids, source in parts:
            self._tokens.add(ids, source)
        self._turn_limit = self._sampling.max_tokens if answer.max_tokens is None else answer.max_tokens
        return None

    def before_turn(self, serving_version: int) -> End | None:
        """May a further turn be sampled, now that weights of `serving_version` serve?"""
        if self._room() <= 0:
            return self._bounds.overflow()
        if (limit := self._spec.group.max_staleness) is None:
            return None
        oldest = self._segments.oldest_version
        return None if oldest is None or serving_version - oldest <= limit else End("abort_stale")

    def request(self) -> Request:
        """The next turn, once `before_turn` has let it pass."""
        spec, index = self._spec, len(self._turns) - self.cut
        begun = self._turns[-1].length if self.cut else 0
        limit = None if self._turn_limit is None else self._turn_limit - begun
        return Request(
            id=f"{self.key}/{index}",
            token_ids=self._tokens.ids,
            sampled=self._tokens.sampled,
            max_tokens=self._room() if limit is None else min(limit, self._room()),
            params=engine_params(
                self._sampling, seed=spec.seed, sample_index=spec.sample_index, segment=self._segments.index
            ),
            stop=self._stop,
            order=spec.order,
            group="" if index else f"{spec.session}/{spec.batch_id}/{spec.group.id}",
            logprob_modes=self._sampling.logprobs,
            top_logprobs=self._sampling.top_logprobs,
            prompt_logprobs=self._sampling.prompt_logprobs and index == 0 and self.sampled == 0,
            trajectory=self.key,
            goes_on=not self._is_last(index),
            expected_wait=sum(turn.times.tool_wait for turn in self._turns) / index if index else 0.0,
            begun=begun,
        )

    def take(self, request: Request, completion: Completion, times: fields.Times, *, ends_when_cut: bool) -> End | None:
        """Append what the turn `request` sampled. ends_when_cut: a turn that was cut ends the trajectory."""
        wrong = fault(completion, request)
        if wrong is None:
            self._turns[len(self._turns) - self.cut :] = [self._turn(completion, times)]
            self._answered = False
            self._tokens.add_sampled(completion)
        if completion.error is not None:
            return _failed(completion.error)
        if wrong is not None:
            return _failed(Failure("internal", f"the engine's reply: {wrong}"))
        return self.ended(ends_when_cut=ends_when_cut)

    def ended(self, *, ends_when_cut: bool) -> End | None:
        """Does the trajectory end with its last turn, which is not answered yet?"""
        turn = self._turns[-1]
        match turn.finish_reason:
            case "stop" | "tool_calls":
                return None
            case "error":
                return _failed(Failure("internal", "the engine's reply: an error that says nothing"))
            case "abort_client" | "abort_weight_update":
                return End(turn.finish_reason)
            case "context_overflow":
                return self._bounds.context_overflow()
            case "length" if turn.length != self._turn_limit:
                return self._bounds.overflow()
            case "length" | "turn_deadline":
                # The second turn in a row in which nothing was sampled: nothing says that there would be a last one.
                idle = turn.length == 0 and len(self._turns) > 1 and self._turns[-2].length == 0
                return self._bounds.cut(turn) if ends_when_cut or idle else None

    def last_turn(self) -> TurnResult:
        turn = self._turns[-1]
        span, ids = slice(turn.start, turn.start + turn.length), self._tokens.ids
        return TurnResult(turn, ids[span], self._tokens.logprobs[span], self.length, ids[: turn.start])

    def waited(self, seconds: float) -> None:
        """The environment had the last turn for so long."""
        turn = self._turns[-1]
        times = turn.times.model_copy(update={"tool_wait": turn.times.tool_wait + seconds})
        self._turns[-1] = turn.model_copy(update={"times": times})

    def answer(self, answer: Answer, *, fixed_turns: bool) -> End | None:
        """What the environment said to the last turn. Nothing is appended where no turn follows.

        fixed_turns: `done` is named after how the last turn ended, not `env_done`.
        """
        self._answered = True
        turn = self._turns[-1]
        called = answer.called and turn.finish_reason == "stop"
        reason = "tool_calls" if called else turn.finish_reason
        self._turns[-1] = turn.model_copy(update={"reward": answer.reward, "finish_reason": reason})
        if answer.done and fixed_turns:
            return End("stop") if turn.finish_reason == "stop" else self._bounds.cut(turn)
        if answer.done:
            return End("env_done")
        if len(self._turns) == self._budget.max_turns:
            return End("max_turns")
        if len(self._turns) >= MAX_TURNS:
            return End("length", Truncation(limit="max_turns", value=MAX_TURNS))
        return self.append(answer)

    def to_record(
        self, end: End, times: fields.Times, wall_s: float, rewards: Rewards, partial: fields.Partial | None = None
    ) -> Record:
        """Raises ValueError where two lengths disagree (the segments check them; the rest is checked already)."""
        spec, group = self._spec, self._spec.group
        if (before := spec.before) is not None:
            times, wall_s = add_times(before.times, times), before.wall_s + wall_s
        status = STATUS_OF[end.reason]
        if status != "aborted":
            partial = None
        return Record.model_construct(
            trajectory_id=spec.trajectory_id,
            group_id=group.id,
            batch_id=spec.batch_id,
            sample_index=spec.sample_index,
            status=status,
            finish_reason=end.reason,
            segments=self._segments.values(self._turns, trainable=status != "failed", whole=partial is not None),
            sampling=self._sampling.model_copy(update={"seed": spec.seed}),
            reward=rewards.total,
            rewards=dict(rewards.parts),
            error=end.failure,
            truncation=end.truncation,
            times=times,
            wall_s=wall_s,
            metadata=group.metadata,
            purpose=group.purpose,
            retries=spec.retries,
            partial=partial,
        )

    def partial(
        self, snapshot: dict[str, Any] | None = None, messages: npt.NDArray[np.uint8] | None = None
    ) -> fields.Partial:
        """What it takes, with its record, to go on from here elsewhere: see `Partial`."""
        return fields.Partial.model_construct(
            answered=self._answered, max_tokens=self._turn_limit, snapshot=snapshot, messages=messages
        )

    @property
    def _tokens(self) -> Tokens:
        return self._segments.now

    def _turn(self, completion: Completion, times: fields.Times) -> Turn:
        limit = self._turn_limit
        if self.cut:
            return gone_on(self._turns[-1], completion, times, limit=limit)
        return turn_of(completion, times, index=len(self._turns), start=self.length, limit=limit)

    def _is_last(self, index: int) -> bool:
        """Is it known that no turn follows this one?"""
        environment = self._spec.group.environment
        scripted = environment.name == "scripted" and index == len(environment.script)
        return scripted or index + 1 == self._budget.max_turns

    def _room(self) -> int:
        return self._bounds.tokens - self.length


def _failed(failure: Failure) -> End:
    reason: TrajectoryReason = "numerical_error" if failure.code == "numerical_error" else "error"
    return End(reason, failure=wire_error(failure, "trajectory").failure("generate"))
