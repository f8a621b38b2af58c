"""What one trajectory is."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.fields import Group, Partial, Record
from rollout.chat.messages import Message, from_json


@dataclass(frozen=True, slots=True)
class TrajectorySpec:
    """Whose it is, what it is to do, and what it goes on from.

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
