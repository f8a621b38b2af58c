"""What comes back: everything about one ended trajectory."""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from protocols.base import Many, Value, readable, refuse
from protocols.opaque import Opaque
from protocols.scalars import (
    SOURCE_SAMPLED,
    STATUS_OF,
    Count,
    Float32,
    Float32Matrix,
    Int32,
    Int32Matrix,
    Int64Matrix,
    LogprobMode,
    Name,
    Positive,
    Purpose,
    Reward,
    Scope,
    Status,
    TrajectoryReason,
    TurnReason,
    UInt8,
)
from protocols.work import Sampling


class Times(Value):
    """Seconds by what was waited for; a trajectory's add up to its wall time in the worker."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    preempted: float = 0.0
    paused: float = 0.0
    tool_wait: float = 0.0


class Failure(Value):
    """An error as data: in `error` replies and in the records of failed trajectories.

    code: one of the errors' codes.
    message: for people; cut at its limit.
    retryable: may the same request succeed later?
    scope: what the error costs.
    field: path of the offending field, such as `groups[3].sampling.top_p`.
    stage: where a trajectory failed, such as `reset`, `step`, `finish`, `generate`.
    """

    code: Name
    message: Annotated[str, Field(max_length=4096), readable(4096)]
    retryable: bool = False
    scope: Scope = "request"
    field: Annotated[str, Field(max_length=1024), readable(1024)] | None = None
    stage: Name | None = None


class Turn(Value):
    """One sampled turn: tokens [start, start + length) of its segment were sampled by it.

    finish_reason: why the turn ended; the trajectory has its own.
    stop: the id (as a decimal string) or the string that ended it.
    prompt_len: tokens that preceded it.
    cached_tokens: of those, how many came from the prefix cache.
    computed_tokens: of those, how many were computed; what a preemption took away and made computed again counts again.
    preemptions: times it gave way to others and was computed again.
    reward: of this turn alone; nil when nobody scored it.
    """

    index: Count
    start: Count
    length: Count
    finish_reason: TurnReason
    stop: str | None = None
    prompt_len: Count = 0
    cached_tokens: Count = 0
    computed_tokens: Count = 0
    preemptions: Count = 0
    times: Times = Field(default_factory=Times)
    reward: Reward | None = None


class Segment(Value):
    """One append-only sequence of L tokens; unless history was rewritten a trajectory has exactly one.

    `logprobs[i]` scores `token_ids[i]` given `token_ids[:i]`; nothing is shifted.

    token_ids: of length L.
    source: of length L: 0 prompt, 1 sampled, 2 glue, 3 observation, 4 prefix taken from another segment.
    logprobs: of length L, of the primary mode, finite, 0.0 wherever source is not 1.
    loss_mask: of length L, 1 where a token was sampled and may be trained on.
    weight_versions: [k, 2], runs of (version, count) over the sampled tokens in order.
    kv_versions: [k, 2], runs of (oldest version whose KV was read, count) over the sampled tokens in order.
    more_logprobs: of length L, of each further mode asked for.
    prompt_logprobs: of the primary mode over the first turn's prompt, entry 0 NaN.
    top_ids: [S, k], one row per sampled token in order.
    top_logprobs: [S, k], those of top_ids.
    """

    token_ids: Int32
    source: UInt8
    logprobs: Float32
    loss_mask: UInt8
    weight_versions: Int64Matrix
    kv_versions: Int64Matrix
    turns: Many[Turn]
    more_logprobs: dict[LogprobMode, Float32] = Field(default_factory=dict)
    prompt_logprobs: Float32 | None = None
    top_ids: Int32Matrix | None = None
    top_logprobs: Float32Matrix | None = None

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        length = len(self.token_ids)
        per_token = {".source": len(self.source), ".logprobs": len(self.logprobs), ".loss_mask": len(self.loss_mask)}
        per_token |= {f".more_logprobs.{mode}": len(array) for mode, array in self.more_logprobs.items()}
        for at, entries in per_token.items():
            if entries != length:
                refuse(f"has {entries} entries for {length} token_ids", at)
        # Numbers of a few microseconds each, for every result there is: counting is numpy's shortest way to say "any".
        if np.count_nonzero(np.isfinite(self.logprobs)) < length:
            refuse("must be finite", ".logprobs")
        is_sampled = self.source == SOURCE_SAMPLED
        if np.count_nonzero(self.logprobs[~is_sampled]):
            refuse("must be 0.0 where the token was not sampled", ".logprobs")
        if np.count_nonzero(self.loss_mask > is_sampled):
            refuse("must be 0 or 1, and 0 where the token was not sampled", ".loss_mask")
        sampled = int(np.count_nonzero(is_sampled))
        for at, runs in ((".weight_versions", self.weight_versions), (".kv_versions", self.kv_versions)):
            if runs.shape[1] != 2:
                refuse(f"must be [k, 2], not {list(runs.shape)}", at)
            counts = runs[:, 1]
            # No sum of these is beyond an int64.
            within = np.minimum.reduce(counts, initial=0) == 0 and np.maximum.reduce(counts, initial=0) <= sampled
            if not within or np.add.reduce(counts) != sampled:
                refuse(f"must count {sampled} sampled tokens in all", at)
        if (self.top_ids is None) != (self.top_logprobs is None):
            refuse("top_ids and top_logprobs come together", ".top_logprobs")
        if self.top_ids is not None and self.top_logprobs is not None:
            if self.top_ids.shape != self.top_logprobs.shape:
                refuse(f"is {list(self.top_logprobs.shape)}, top_ids {list(self.top_ids.shape)}", ".top_logprobs")
            if len(self.top_ids) != sampled:
                refuse(f"has {len(self.top_ids)} rows for {sampled} sampled tokens", ".top_ids")
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) > length:
            refuse(f"has {len(self.prompt_logprobs)} entries for {length} token_ids", ".prompt_logprobs")
        for i, turn in enumerate(self.turns):
            if turn.start + turn.length > length:
                refuse(f"lies outside of the segment's {length} tokens", f".turns[{i}]")
        return self


class Truncation(Value):
    """What ended a truncated trajectory early.

    limit: a field of the budget, `max_context` or `max_segments`.
    value: what it was.
    """

    limit: str
    value: float


class Partial(Value):
    """What it takes, besides its record, for a trajectory to go on where it was cut.

    answered: the environment has answered the last turn, and what it said is in the segment.
    max_tokens: of the turn that was cut or comes next; nil fills up to the context limit.
    snapshot: of the environment, before the turn that is not answered; nil for one that needs none.
    messages: of a conversation, what was said after the submitted messages and before the turn that is not answered: a
        JSON list as UTF-8; nil where that is nothing.
    """

    answered: bool = False
    max_tokens: Positive | None = None
    snapshot: Opaque | None = None
    messages: UInt8 | None = None


class Record(Value):
    """Everything about one ended trajectory.

    status: follows from finish_reason.
    sampling: every effective value, the drawn seed included.
    reward: nil means that nobody scored it, never 0.
    rewards: named parts, when the environment gave any.
    error: always there when status is `failed`.
    wall_s: from accept to end, in the worker.
    metadata: the group's.
    retries: earlier attempts at this trajectory that failed; each attempt has a sample index of its own.
    partial: of an aborted trajectory that can go on: submit its group again with this record among `partials`.
    """

    trajectory_id: Name
    group_id: Name
    batch_id: Name
    sample_index: Annotated[int, Field(ge=0, lt=2**32)]
    status: Status
    finish_reason: TrajectoryReason
    segments: Annotated[Many[Segment], Field(min_length=1)]
    sampling: Sampling
    reward: Reward | None = None
    rewards: dict[str, Reward] = Field(default_factory=dict, max_length=256)
    error: Failure | None = None
    truncation: Truncation | None = None
    times: Times = Field(default_factory=Times)
    wall_s: float = 0.0
    metadata: Opaque = Field(default_factory=dict)
    purpose: Purpose = "train"
    retries: Count = 0
    partial: Partial | None = None

    @model_validator(mode="after")
    def _status_agrees(self) -> Self:
        if self.status != STATUS_OF[self.finish_reason]:
            refuse(f"is {self.status}, but {self.finish_reason} makes it {STATUS_OF[self.finish_reason]}", ".status")
        if self.partial is not None and self.status != "aborted":
            refuse("belongs to an aborted trajectory", ".partial")
        if self.status == "failed":
            if self.error is None:
                refuse("is required of a failed trajectory", ".error")
            for i, segment in enumerate(self.segments):
                if segment.loss_mask.any():
                    refuse("must be 0 throughout in a failed trajectory", f".segments[{i}].loss_mask")
        return self
