"""May a returned record go on? Its group says what it is, the record what it has: the two must be of one trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from protocols.errors import BadRequest
from protocols.fields import SOURCE_SAMPLED, Environment, Group, ModelInfo, Partial, Record, Segment, Turn
from protocols.requests import SubmitBatch
from rollout.batches.record_size import may_branch
from rollout.environments.base import said_by
from rollout.environments.checks import outside_of
from rollout.environments.isolated import can_snapshot
from rollout.trajectory.segments import MAX_SEGMENTS
from rollout.trajectory.turns import ABORTED


def check_partials(submit: SubmitBatch, *, model: ModelInfo, resolve: Callable[[Environment], object]) -> None:
    """Raises BadRequest with the path of the first field that does not fit."""
    if not submit.partials:
        return
    homes = {
        name: (group, index)
        for group in submit.groups
        for name, index in zip(
            group.trajectory_ids, group.sample_indices or range(len(group.trajectory_ids)), strict=True
        )
    }
    for i, record in enumerate(submit.partials):
        if record.trajectory_id not in homes:
            raise BadRequest("is in no group of this submit, or twice here", field=f"partials[{i}].trajectory_id")
        group, index = homes.pop(record.trajectory_id)
        try:
            _check(record, group, index, model, resolve)
        except BadRequest as error:
            raise BadRequest(error.message, field=f"partials[{i}].{error.field}") from None


def _check(
    record: Record, group: Group, index: int, model: ModelInfo, resolve: Callable[[Environment], object]
) -> None:
    if record.partial is None:
        raise BadRequest(f"this record, {record.finish_reason}, is not one that can go on", field="partial")
    *closed, last = record.segments
    turns = [turn for segment in record.segments for turn in segment.turns]
    known = record.segments[0].token_ids
    for field, fits in (
        ("group_id", record.group_id == group.id),
        ("sample_index", record.sample_index == index),
        ("sampling", record.sampling == group.sampling and record.sampling.seed is not None),
        ("segments", not closed or (may_branch(group) and len(closed) < MAX_SEGMENTS)),
        ("segments[0].turns", [turn.index for turn in turns] == list(range(len(turns)))),
        ("segments[0].turns", all(segment.turns for segment in closed)),
        ("partial.answered", bool(last.turns) or record.partial.answered),
        ("partial.max_tokens", _has_budget_left(record.partial, turns)),
        ("partial.messages", record.partial.messages is None or group.messages is not None),
    ):
        if not fits:
            raise BadRequest(f"is not that of its trajectory in group {group.id!r}", field=field)
    if not np.array_equal(known[: len(group.prompt)], group.prompt):
        why = f"does not begin with the prompt of group {group.id!r}"
        if group.messages is not None:
            why += ", as the chat template and the tools here make it of the messages"
        raise BadRequest(why, field="segments[0].token_ids")
    for k, segment in enumerate(record.segments):
        _check_segment(segment, f"segments[{k}]", group, model)
    begun = len(known) > len(group.prompt) or turns
    made = said_by(resolve(group.environment))
    stateless = group.environment.stateless or getattr(made, "stateless", False)
    if not begun or stateless:
        return
    if record.partial.snapshot is None or not (isinstance(made, type) and can_snapshot(made)):
        raise BadRequest(
            f"the state of environment {group.environment.name!r} is not in it: it takes `snapshot` and `restore`",
            field="partial.snapshot",
        )


def _check_segment(segment: Segment, field: str, group: Group, model: ModelInfo) -> None:
    if (*segment.more_logprobs,) != group.sampling.logprobs[1:]:
        raise BadRequest(f"are not those of its trajectory in group {group.id!r}", field=f"{field}.more_logprobs")
    alternatives = 0 if segment.top_ids is None else segment.top_ids.shape[1]
    if alternatives != group.sampling.top_logprobs and (alternatives or (segment.source == SOURCE_SAMPLED).any()):
        why = f"has {alternatives} of each sampled token, and group {group.id!r} asks for {group.sampling.top_logprobs}"
        raise BadRequest(why, field=f"{field}.top_ids")
    if (at := outside_of(segment.token_ids, model.vocab_size)) is not None:
        raise BadRequest(f"id {segment.token_ids[at]} lies outside of the vocabulary", field=f"{field}.token_ids")
    if len(segment.token_ids) > model.max_context:
        raise BadRequest(f"has more tokens than fit into {model.max_context}", field=f"{field}.token_ids")


def _has_budget_left(partial: Partial, turns: Sequence[Turn]) -> bool:
    """Of the turn that was broken off, if one was."""
    cut = not partial.answered and bool(turns) and turns[-1].finish_reason in ABORTED
    return not cut or partial.max_tokens is None or partial.max_tokens > turns[-1].length
