"""Records as a worker makes them, with the few things that metrics look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocols.fields import STATUS_OF, Failure, Record, Sampling, Segment, Times, TrajectoryReason, Turn
from rollout.metrics.observer import Round

NOW = 100.0
ROUND = Round("session", "batch", 7, NOW)


def record(
    reason: TrajectoryReason = "stop",
    lengths: Sequence[int] = (4,),
    *,
    versions: Sequence[tuple[int, int]] | None = None,
    times: dict[str, float] | None = None,
    **fields: Any,
) -> Record:
    """lengths: sampled tokens of each turn; a prompt of two comes first. versions: runs of the sampled tokens."""
    count = sum(lengths)
    source = np.array([0, 0] + [1] * count, np.uint8)
    starts = np.cumsum([2, *lengths])
    failed = STATUS_OF[reason] == "failed"
    segment = Segment(
        token_ids=np.arange(2 + count, dtype=np.int32),
        source=source,
        logprobs=np.zeros(2 + count, np.float32) - source,
        loss_mask=source * np.uint8(not failed),
        weight_versions=np.array(versions or [(0, count)], np.int64).reshape(-1, 2),
        kv_versions=np.array([(0, count)], np.int64),
        turns=tuple(
            Turn(
                index=i,
                start=int(starts[i]),
                length=length,
                finish_reason="stop",
            )
            for i, length in enumerate(lengths)
        ),
    )
    return Record(
        **{
            "trajectory_id": "t",
            "group_id": "g",
            "batch_id": "batch",
            "sample_index": 0,
            "status": STATUS_OF[reason],
            "finish_reason": reason,
            "segments": (segment,),
            "sampling": Sampling(),
            "error": Failure(code="internal", message="broke") if failed else None,
            "times": Times(**(times or {})),
            "wall_s": sum((times or {}).values()),
            **fields,
        }
    )
