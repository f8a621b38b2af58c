"""The values around a trajectory: what it is, what its environment answers, why it ends."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import IntArray
from protocols.fields import Failure, Group, Partial, Record, TrajectoryReason, Truncation
from rollout.chat.messages import Message, from_json


@dataclass(frozen=True, slots=True)
class TrajectorySpec:
    """What one trajectory is.

    seed: resolved (drawn at accept when the group has none). sample_index: the noise key of the sample.
    order: start of the trajectory among all of the worker's; smaller runs first.
    accepted: `time.monotonic()` at accept; waiting before `Rollout.run` then counts as queue time and against
        `trajectory_deadline_s`. None: the time of `run`.
    retries: attempts at it that failed. before: what it had when it was cut, and goes on from; its budgets are used
        up as far as that says. resumable: keep what it takes for the environment to go on elsewhere.
    """

    session: str
    batch_id: str
    group: Group
    trajectory_id: str
    sample_index: int
    seed: int
    order: int = 0
    accepted: float | None = None
    retries: int = 0
    before: Record | None = None
    resumable: bool = False

    @property
    def partial(self) -> Partial | None:
        """What it goes on from, besides its tokens."""
        return None if self.before is None else self.before.partial

    @property
    def said(self) -> tuple[Message, ...]:
        """In the conversation that it goes on with, after the submitted messages."""
        said = None if self.partial is None else self.partial.messages
        return () if said is None else from_json(said.tobytes())


@dataclass(frozen=True, slots=True)
class End:
    """Why a trajectory ended. truncation: the limit that cut it; failure: what went wrong in a failed one."""

    reason: TrajectoryReason
    truncation: Truncation | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What an environment said, checked: ids are int32[n] inside the vocabulary, the reward is finite. See `Step`."""

    glue: IntArray | None = None
    observation: IntArray | None = None
    opening: IntArray | None = None
    branch: IntArray | None = None
    called: bool = False
    max_tokens: int | None = None
    done: bool = False
    reward: float | None = None
