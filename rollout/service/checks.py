"""What of a valid message this worker cannot do: looked at as a whole before anything of it is accepted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.check import can_divide, in_float32
from protocols.errors import BadRequest, PromptTooLong
from protocols.fields import Environment, Group, Limits, ModelInfo, Sampling
from protocols.requests import Score, SubmitBatch
from rollout.batches.partials import check_partials
from rollout.environments.checks import outside_of

CAPABILITIES = ("scripted", "remote", "plugins", "chat", "early_cut", "resume", "score", "drain", "abort")
"""What `welcome` lists. Refused by name until listed: sleep, keep_kv, recompute_kv."""

Ids = npt.NDArray[np.integer]


def lacking(capability: str, field: str | None = None) -> BadRequest:
    return BadRequest(f"this worker lacks the capability {capability!r}; it has {', '.join(CAPABILITIES)}", field=field)


def check_submit(submit: SubmitBatch, *, model: ModelInfo, resolve: Callable[[Environment], object]) -> None:
    """Raises BadRequest or PromptTooLong with the path of the first field that cannot be. resolve: see Registry."""
    partials = {record.trajectory_id for record in submit.partials}
    for i, group in enumerate(submit.groups):
        whole = partials.isdisjoint(group.trajectory_ids)
        if whole and (submit.min_complete or 0) > len(group.trajectory_ids) + group.counted:
            raise BadRequest(f"is more than the samples of groups[{i}]", field="min_complete")
        try:
            _check_group(group, model)
        except (BadRequest, PromptTooLong) as error:
            raise type(error)(error.message, field=f"groups[{i}].{error.field}") from None
    check_partials(submit, model=model, resolve=resolve)


BLOB_HEADER = 64
"""Bytes at most that one array adds to a header."""


def check_score(score: Score, *, model: ModelInfo, limits: Limits) -> None:
    """Raises BadRequest or PromptTooLong."""
    arrays = len(score.sequences) * len(score.sampling.logprobs)
    reply = 4 * len(score.sampling.logprobs) * sum(map(len, score.sequences)) + BLOB_HEADER * arrays
    if reply > limits.max_message:
        raise BadRequest(
            f"the reply would have {reply} bytes, more than max_message, {limits.max_message}: score fewer sequences "
            "at a time",
            field="sequences",
        )
    for i, ids in enumerate(score.sequences):
        if len(ids) > model.max_context:
            raise PromptTooLong(f"has {len(ids)} tokens, more than {model.max_context}", field=f"sequences[{i}]")
        _check_ids(ids, f"sequences[{i}]", model)
    _check_sampling(score.sampling, model)


def _check_group(group: Group, model: ModelInfo) -> None:
    length, source = len(group.prompt), "prompt" if group.messages is None else "messages"
    if length >= model.max_context:
        raise PromptTooLong(
            f"{length} tokens leave no room for a sampled one in a context of {model.max_context}", field=source
        )
    total = group.budget.max_total_tokens
    if total is not None and total <= length:
        raise BadRequest(f"{total} leaves no room after a prompt of {length}", field="budget.max_total_tokens")
    _check_ids(group.prompt, source, model)
    _check_sampling(group.sampling, model)
    for k, turn in enumerate(group.environment.script):
        for name, ids in (("glue", turn.glue), ("observation", turn.observation)):
            if ids is not None:
                _check_ids(ids, f"environment.script[{k}].{name}", model)


def _check_sampling(sampling: Sampling, model: ModelInfo) -> None:
    for field, given in (
        ("allowed_ids", sampling.allowed_ids),
        ("bias_ids", sampling.bias_ids),
        ("stop_ids", sampling.stop_ids),
    ):
        if given is not None and len(given):
            _check_ids(np.asarray(given, np.int64), f"sampling.{field}", model)
    for field, good in (
        ("repetition_penalty", can_divide),
        ("presence_penalty", in_float32),
        ("frequency_penalty", in_float32),
    ):
        if not good(getattr(sampling, field)):
            raise BadRequest("is out of float32's range, in which the law is computed", field=f"sampling.{field}")
    if sampling.stop and model.tokenizer_hash is None:
        raise BadRequest("the checkpoint has no tokenizer.json: stop with stop_ids", field="sampling.stop")
    if sampling.allowed_ids is not None and len(sampling.allowed_ids) == 0:
        raise BadRequest("allows no id", field="sampling.allowed_ids")
    if sampling.bias_ids is not None and len(np.unique(sampling.bias_ids)) < len(sampling.bias_ids):
        raise BadRequest("names an id twice", field="sampling.bias_ids")


def _check_ids(ids: Ids, field: str, model: ModelInfo) -> None:
    if (at := outside_of(ids, model.vocab_size)) is not None:
        raise BadRequest(
            f"id {ids[at]} at {at} lies outside of the vocabulary, 0 to {model.vocab_size - 1}", field=field
        )
