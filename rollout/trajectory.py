"""One trajectory as a pure state machine: tokens, budgets, turns; no engine, no clock, no asyncio."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.fields import Group


@dataclass(frozen=True, slots=True)
class TrajectorySpec:
    """What one trajectory is.

    seed: resolved (drawn at accept when the group has none). sample_index: the noise key of the sample.
    order: start of the trajectory among all of the worker's; smaller runs first.
    accepted: `time.monotonic()` at accept; waiting before `Rollout.run` then counts as queue time and against
        `trajectory_deadline_s`. None: the time of `run`.
    """

    session: str
    batch_id: str
    group: Group
    trajectory_id: str
    sample_index: int
    seed: int
    order: int = 0
    accepted: float | None = None
