"""How large a record may become, before anything is sampled, and how large one is."""

from __future__ import annotations

import msgpack
import numpy as np

from protocols.codec import encode
from protocols.fields import Group, Record
from rollout.trajectory.segments import MAX_SEGMENTS

RECORD_OVERHEAD = 8192
"""Bytes reserved for the rest of a record's header: names, keys, an error."""
RUNS_BYTES = 32 * 32
"""Bytes of the runs of weight and KV versions of a trajectory that saw 32 updates."""
TURN_BYTES = 512
"""Bytes of one turn in a header, generously."""
TURN_TOKENS = 16
"""Tokens of an average turn, at least, where `max_turns` does not bound their number."""


def longest(group: Group, max_context: int) -> int:
    """Tokens of the longest trajectory that a sample of `group` can become."""
    limit = min(max_context, group.budget.max_total_tokens or max_context)
    if group.environment.name != "scripted" or group.sampling.max_tokens is None:
        return limit
    length = len(group.prompt) + group.sampling.max_tokens
    for turn in group.environment.script:
        length += sum(len(ids) for ids in (turn.glue, turn.observation) if ids is not None)
        length += turn.max_tokens or group.sampling.max_tokens
    return min(limit, length)


def echoed_bytes(group: Group) -> int:
    """Bytes that come back in every record as they were sent: the sampling law and the metadata."""
    return sum(len(frame) for frame in encode(group.sampling)) + len(msgpack.packb(group.metadata))


def may_branch(group: Group) -> bool:
    """Can the conversation be rendered anew, in a further segment?"""
    return group.messages is not None and group.template.may_branch


def largest_record(group: Group, max_context: int, echoed: int) -> int:
    """Bytes of the largest record that a sample of `group` can become. Named rewards are counted as a few.

    echoed: `echoed_bytes` of the group.
    """
    length, prompt = longest(group, max_context), len(group.prompt)
    segments = MAX_SEGMENTS if may_branch(group) else 1
    sampled = segments * max(0, length - prompt)
    per_token = 4 + 1 + 4 + 1 + 4 * (len(group.sampling.logprobs) - 1)
    turns = len(group.environment.script) + 1
    if group.environment.name != "scripted":
        turns = min(group.budget.max_turns or sampled, sampled // TURN_TOKENS + 1)
    return (
        RECORD_OVERHEAD
        + RUNS_BYTES * segments
        + echoed
        + length * segments * per_token
        + prompt * 4 * group.sampling.prompt_logprobs
        + sampled * 8 * group.sampling.top_logprobs
        + turns * TURN_BYTES
    )


def record_bytes(record: Record, echoed: int) -> int:
    """Bytes that a record occupies until it is acknowledged. echoed: `echoed_bytes` of its group."""
    size = RECORD_OVERHEAD + echoed
    for segment in record.segments:
        values = (*vars(segment).values(), *segment.more_logprobs.values())
        size += sum(value.nbytes for value in values if isinstance(value, np.ndarray))
        size += TURN_BYTES * len(segment.turns)
    if (partial := record.partial) is not None:
        size += 0 if partial.messages is None else partial.messages.nbytes
        size += 0 if partial.snapshot is None else len(msgpack.packb(partial.snapshot))
    return size
