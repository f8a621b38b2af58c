"""What a trajectory gets of its environment: an answer, or its end."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import IntArray
from protocols.fields import Failure, TrajectoryReason, Truncation


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


@dataclass(frozen=True, slots=True)
class End:
    """Why a trajectory ended. truncation: the limit that cut it; failure: what went wrong in a failed one."""

    reason: TrajectoryReason
    truncation: Truncation | None = None
    failure: Failure | None = None
