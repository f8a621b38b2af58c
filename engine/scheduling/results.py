"""What of a step's output counts: the rows of requests that are still there, and were not flagged."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.request import BoolArray, FloatArray, Int64Array, IntArray
from engine.scheduling.scheduled import Chunk, Scheduled
from engine.scheduling.sequence import Sequence
from engine.scheduling.slots import SlotTable
from engine.step import NONFINITE, StepOutput


class Results(NamedTuple):
    """A finished step.

    slots, positions: int64[n], token_ids: int32[n], logprobs: float32[3, n]: tokens sampled, and where they go.
    num_live: rows of the step whose request is still there.
    failed: requests that end in an error, with their flags. chunks: prefill rows whose KV is good.
    """

    slots: Int64Array
    positions: Int64Array
    token_ids: IntArray
    logprobs: FloatArray
    num_live: int
    failed: tuple[tuple[Sequence, int], ...] = ()
    chunks: tuple[Chunk, ...] = ()


def live_results(scheduled: Scheduled, output: StepOutput, table: SlotTable) -> Results:
    """Sort out a step; scores and alternatives go to their sequences here.

    A row whose request has ended since the launch is told by its slot, which is empty or has a later tenant.
    """
    plan, slots, computed = scheduled.plan, scheduled.slots, scheduled.computed
    live = table.first_step[slots] <= plan.step
    num_live = int(np.count_nonzero(live))
    plain = not plan.scores and not table.with_top and not np.count_nonzero(output.flags)
    if plain and num_live == len(live):
        rows = plan.samples.nonzero()[0] if scheduled.chunks else slice(None)
        return Results(slots[rows], computed[rows], output.token_ids, output.logprobs, num_live, (), scheduled.chunks)

    sampling = plan.samples.nonzero()[0]
    flags = np.zeros(len(live), np.uint8)
    flags[sampling] = output.flags
    flags[_take_scores(scheduled, output, live)] |= NONFINITE
    good = live & (flags == 0)
    kept = good[sampling].nonzero()[0]
    rows = sampling[kept]
    if table.with_top:
        _take_alternatives(output, kept.tolist(), slots[rows].tolist(), table)
    return Results(
        slots=slots[rows],
        positions=computed[rows],
        token_ids=output.token_ids[kept],
        logprobs=output.logprobs[:, kept],
        num_live=num_live,
        failed=tuple((table.owner(slots[i]), int(flags[i])) for i in (live & ~good).nonzero()[0].tolist()),
        chunks=tuple(chunk for chunk, ok in zip(scheduled.chunks, good[plan.num_decode :].tolist(), strict=True) if ok),
    )


def _take_scores(scheduled: Scheduled, output: StepOutput, live: BoolArray) -> list[int]:
    """Give live rows their prompt logprobs; returns the rows where one that was asked for is NaN."""
    bad = []
    for wanted, scores in zip(scheduled.plan.scores, output.scores, strict=True):
        chunk = scheduled.chunks[wanted.row - scheduled.plan.num_decode]
        if live[wanted.row] and not chunk.sequence.add_scores(chunk.start, scores):
            bad.append(wanted.row)
    return bad


def _take_alternatives(output: StepOutput, kept: list[int], slots: list[int], table: SlotTable) -> None:
    for i, slot in zip(kept, slots, strict=True):
        sequence = table.with_top.get(slot)
        if sequence is not None:
            assert output.top_ids is not None
            assert output.top_logprobs is not None
            k = sequence.request.top_logprobs
            sequence.top.append((output.top_ids[i, :k].copy(), output.top_logprobs[i, :k].copy()))
