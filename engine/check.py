"""Which requests are refused before they are queued; each refusal names the field."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from engine.config import BLOCK_SIZE, MAX_TOP_LOGPROBS, EngineConfig
from engine.errors import PromptTooLong, RequestError, RequestTooLarge
from engine.request import LOGPROB_MODES, Request, SamplingParams, StopRule

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def check_request(request: Request, config: EngineConfig, vocab_size: int, num_blocks: int, has_bytes: bool) -> None:
    """Raises `RequestError`. num_blocks: blocks that can be handed out; has_bytes: stop strings can be matched.

    A prompt that leaves no room for a token is too long, except that a score may fill the context exactly.
    """
    ids = request.token_ids
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise RequestError(
            f"token_ids must be int32 of one dimension, not {ids.dtype} of {ids.ndim}", field="token_ids"
        )
    if not len(ids):
        raise RequestError("the prompt is empty", field="token_ids")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise RequestError(f"token_ids must lie in [0, {vocab_size}), the rows of the head", field="token_ids")
    if request.max_tokens < 0 or (request.max_tokens == 0 and not request.prompt_logprobs):
        raise RequestError(f"max_tokens must be positive, not {request.max_tokens}", field="max_tokens")
    if len(ids) > config.max_context - (request.max_tokens > 0):
        raise PromptTooLong(
            f"a prompt of {len(ids)} tokens leaves no room in a context of {config.max_context}", field="token_ids"
        )
    positions = max(len(ids), min(len(ids) + request.max_tokens, config.max_context) - 1)
    if positions > num_blocks * BLOCK_SIZE:
        raise RequestTooLarge(
            f"{positions} tokens can never fit in a KV pool of {num_blocks * BLOCK_SIZE}", field="max_tokens"
        )
    if request.sampled is not None and request.sampled.shape != ids.shape:
        raise RequestError(f"sampled has {request.sampled.shape} entries for {len(ids)} ids", field="sampled")
    modes = request.logprob_modes
    if not modes or len(set(modes)) < len(modes) or not set(modes) <= set(LOGPROB_MODES):
        raise RequestError(f"logprob_modes must be different ones of {LOGPROB_MODES}", field="logprob_modes")
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    if not 0 <= request.top_logprobs <= most:
        raise RequestError(f"top_logprobs must lie in [0, {most}]", field="top_logprobs")
    _check_params(request.params, vocab_size)
    _check_stop(request.stop, vocab_size, has_bytes)


def in_float32(value: float) -> bool:
    """The law computes in float32, where a larger number would be an infinity, and infinities make NaN."""
    return abs(value) <= _LARGEST


def can_divide(value: float) -> bool:
    """What logits are divided by: neither 0 nor an infinity once it is a float32, nor so small that 1 / value is."""
    return _SMALLEST <= value <= _LARGEST


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    # Written so that NaN fails each of them.
    for name, good, rule in (
        ("temperature", 0 <= params.temperature < math.inf, "finite and at least 0"),
        ("top_k", params.top_k >= 0, "at least 0"),
        ("top_p", 0 < params.top_p <= 1, "in (0, 1]"),
        ("min_p", 0 <= params.min_p <= 1, "in [0, 1]"),
        ("repetition_penalty", can_divide(params.repetition_penalty), "positive, it and its reciprocal in float32"),
        ("presence_penalty", in_float32(params.presence_penalty), "finite in float32"),
        ("frequency_penalty", in_float32(params.frequency_penalty), "finite in float32"),
        ("logit_bias", all(map(in_float32, params.logit_bias.values())), "finite in float32"),
        ("seed", 0 <= params.seed < 2**64, "in [0, 2**64)"),
        ("sample_index", 0 <= params.sample_index < 2**32, "in [0, 2**32)"),
        ("segment", 0 <= params.segment < 2**32, "in [0, 2**32)"),
    ):
        if not good:
            raise RequestError(f"{name} must be {rule}", field=name)
    if params.allowed_ids is not None:
        if not params.allowed_ids:
            raise RequestError("allowed_ids is empty: nothing could be sampled", field="allowed_ids")
        _check_ids(params.allowed_ids, vocab_size, "allowed_ids")
    _check_ids(params.logit_bias, vocab_size, "logit_bias")


def _check_stop(stop: StopRule, vocab_size: int, has_bytes: bool) -> None:
    _check_ids(stop.ids, vocab_size, "stop_ids")
    if not all(stop.strings):
        raise RequestError("a stop string is empty", field="stop")
    if stop.strings and not has_bytes:
        raise RequestError("stop strings need a tokenizer, and this engine has none", field="stop")


def _check_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    if not all(0 <= i < vocab_size for i in ids):
        raise RequestError(f"{field} must lie in [0, {vocab_size})", field=field)
