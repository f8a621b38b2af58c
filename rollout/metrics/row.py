"""What every place that shows numbers is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ROUND_AXIS = "rollout/step"
"""The trainer's step: what `rollout/*` is drawn over."""
TIME_AXIS = "worker/time_s"
"""Unix time in seconds: what the gauges are drawn over. It goes on where a resumed run left off."""


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers by name, each axis among them. kind: a round's roll-up, or gauges of now. time: Unix seconds."""

    kind: Literal["round", "gauges"]
    time: float
    values: Mapping[str, float]
