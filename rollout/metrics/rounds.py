"""`rollout/*`: one roll-up per round, out of the records of its trajectories."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from engine.config import BLOCK_SIZE
from protocols.fields import Record, Status, Times, TrajectoryReason
from rollout.metrics.observer import Round
from rollout.metrics.row import ROUND_AXIS

PARTS = tuple(Times.model_fields)
"""What a trajectory waits for; the order of `OpenRound.times`."""
WHOLE: frozenset[Status] = frozenset(("completed", "truncated"))
"""Trajectories that ended by themselves: their lengths are those of the policy."""


@dataclass(slots=True)
class OpenRound:
    """What is kept of trajectories, one entry each.

    lengths, turns: of those in `WHOLE`. cut: lengths of those that ended as surplus. times: seconds, in the order of
    PARTS. staleness: of those with sampled tokens. ended: `time.monotonic()`. groups: seconds of the whole ones.
    computed, lost: tokens before all turns that go on after another, of whose KV the other had filled whole blocks; of
    those, how many were not in the prefix cache any more.
    """

    accepted: int = 0
    lengths: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    times: list[tuple[float, ...]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    groups: list[float] = field(default_factory=list)
    trained: set[str] = field(default_factory=set)
    tokens: int = 0
    computed: int = 0
    lost: int = 0
    reasons: Counter[TrajectoryReason] = field(default_factory=Counter)
    statuses: Counter[Status] = field(default_factory=Counter)


class Rounds:
    """Rounds that are under way. Records of `purpose` eval count nowhere."""

    def __init__(self) -> None:
        self._open: defaultdict[Round, OpenRound] = defaultdict(OpenRound)
        self._seen: set[TrajectoryReason] = set()

    def accept(self, batch: Round, trajectories: int) -> None:
        self._open[batch].accepted += trajectories

    def add(self, batch: Round, record: Record, version: int, now: float) -> None:
        """A trajectory ended at `now` (`time.monotonic()`), while weights of `version` served."""
        if record.purpose == "eval":
            return
        counted = self._open[batch]
        turns = [turn for segment in record.segments for turn in segment.turns]
        length = sum(turn.length for turn in turns)
        counted.tokens += length
        counted.statuses[record.status] += 1
        counted.reasons[record.finish_reason] += 1
        counted.ended.append(now)
        counted.trained.add(record.group_id)
        counted.times.append(tuple(getattr(record.times, part) for part in PARTS))
        for segment in record.segments:
            for before, turn in pairwise(segment.turns):
                computed = (before.start + before.length - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token has no KV yet
                counted.computed += computed
                counted.lost += max(0, computed - turn.cached_tokens)
        if record.status in WHOLE:
            counted.lengths.append(length)
            counted.turns.append(len(turns))
        elif record.finish_reason == "abort_surplus":
            counted.cut.append(length)
        versions = [run[0] for segment in record.segments for run in segment.weight_versions.tolist() if run[1]]
        if versions:
            counted.staleness.append(version - min(versions))

    def group_done(self, batch: Round, group_id: str, seconds: float) -> None:
        counted = self._open[batch]
        if group_id in counted.trained:
            counted.groups.append(seconds)

    @np.errstate(invalid="ignore")
    def close(self, batch: Round) -> dict[str, float] | None:
        """The roll-up of a round that is over. None: it had nothing to train on."""
        counted = self._open.pop(batch, None)
        if counted is None or not counted.ended:
            return None
        self._seen |= counted.reasons.keys()
        count = len(counted.ended)
        seconds = max(max(counted.ended) - batch.accepted, 1e-9)
        return {
            ROUND_AXIS: batch.step,
            "rollout/tokens_per_s": counted.tokens / seconds,
            "rollout/trajectories_per_s": count / seconds,
            "rollout/round_time_s": seconds,
            "rollout/tail_ratio": _tail(counted.ended) / seconds,
            **_spread("rollout/response_len", counted.lengths, mean=None, p50=50, p95=95, max=100),
            **_spread("rollout/num_turns", counted.turns, mean=None, max=100),
            "rollout/truncated_ratio": counted.statuses["truncated"] / count,
            "rollout/aborted_ratio": counted.statuses["aborted"] / count,
            "rollout/failed_ratio": counted.statuses["failed"] / count,
            **{f"rollout/finish/{reason}": counted.reasons[reason] / count for reason in sorted(self._seen)},
            **_spread("rollout/group_completion_time", counted.groups, mean=None, p90=90, max=100),
            **_times(counted.times),
            **_spread("rollout/staleness", counted.staleness, mean=None, max=100),
            **({"rollout/recomputed_ratio": counted.lost / counted.computed} if counted.computed else {}),
            "rollout/nonfinite_count": counted.reasons["numerical_error"],
            "rollout/cut/count": len(counted.cut),
            **(_cut(counted) if counted.cut else {}),
        }

    @property
    def progress(self) -> tuple[int, int, int] | None:
        """(step, ended, accepted) of the oldest round under way."""
        for batch, counted in self._open.items():
            return batch.step, len(counted.ended), counted.accepted
        return None


def _spread(name: str, values: list[int] | list[float], **wanted: int | None) -> dict[str, float]:
    """Percentiles by name; None is the mean. Nothing where there is nothing."""
    if not values:
        return {}
    array = np.asarray(values, np.float64)
    return {
        f"{name}/{suffix}": float(array.mean() if percentile is None else np.percentile(array, percentile))
        for suffix, percentile in wanted.items()
    }


def _times(times: list[tuple[float, ...]]) -> dict[str, float]:
    columns = np.asarray(times, np.float64)
    mean, p95 = columns.mean(axis=0), np.percentile(columns, 95, axis=0)
    found = {}
    for i, part in enumerate(PARTS):
        found[f"rollout/time/{part}_s/mean"] = float(mean[i])
        found[f"rollout/time/{part}_s/p95"] = float(p95[i])
    return found


def _cut(counted: OpenRound) -> dict[str, float]:
    return {
        **_spread("rollout/cut", counted.lengths, kept_len_mean=None),
        **_spread("rollout/cut", counted.cut, cut_len_mean=None),
    }


def _tail(ended: list[float]) -> float:
    """Seconds in which only the last tenth of the trajectories still ran."""
    in_order = sorted(ended)
    return in_order[-1] - in_order[math.ceil(0.9 * len(in_order)) - 1]
