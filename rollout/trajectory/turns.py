"""What a record says of a turn, made of what the engine returned: for all of it, or the rest of one that was cut."""

from __future__ import annotations

from engine.request import Completion
from protocols.fields import Times, Turn

ABORTED = ("abort_client", "abort_weight_update")
"""Reasons of a turn that can go on where it was broken off."""
MAX_TURNS = 8192
"""Of a trajectory: an environment that never says `done` would make a record whose header nobody takes."""


def turn_of(completion: Completion, times: Times, *, index: int, start: int, limit: int | None) -> Turn:
    """start: its position in its segment. limit: tokens that it may have."""
    count = len(completion.token_ids)
    return Turn.model_construct(  # our own plain values, once a turn: not worth a validation
        index=index,
        start=start,
        length=count,
        finish_reason=_reason(completion, count, limit),
        stop=_stop(completion),
        prompt_len=start,
        cached_tokens=completion.cached_tokens,
        computed_tokens=completion.computed_tokens,
        preemptions=completion.preemptions,
        times=times,
    )


def gone_on(before: Turn, completion: Completion, times: Times, *, limit: int | None) -> Turn:
    """`before` was cut, and `completion` is its rest."""
    length = before.length + len(completion.token_ids)
    return before.model_copy(
        update={
            "length": length,
            "finish_reason": _reason(completion, length, limit),
            "stop": _stop(completion),
            "computed_tokens": before.computed_tokens + completion.computed_tokens,
            "preemptions": before.preemptions + completion.preemptions + 1,
            "times": add_times(before.times, times),
        }
    )


def add_times(one: Times, other: Times) -> Times:
    return Times.model_construct(**{name: getattr(one, name) + getattr(other, name) for name in Times.model_fields})


def _reason(completion: Completion, length: int, limit: int | None) -> str:
    """A turn that has all the tokens it may have cannot go on."""
    reason: str = completion.finish_reason
    return "length" if reason in ABORTED and length == limit else reason


def _stop(completion: Completion) -> str | None:
    stop = completion.stop
    if isinstance(stop, bytes):
        return stop.decode(errors="replace")
    return None if stop is None else str(stop)
