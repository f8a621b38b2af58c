"""From the wire's `Sampling` to the engine's terms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from engine.request import SamplingParams, StopRule
from protocols.fields import Sampling

NO_BIAS: Final[Mapping[int, float]] = MappingProxyType({})


def engine_params(sampling: Sampling, *, seed: int, sample_index: int, segment: int = 0) -> SamplingParams:
    """The law and the noise key of the turns of one segment of a trajectory."""
    bias = NO_BIAS
    if sampling.bias_ids is not None and sampling.bias_values is not None:
        bias = MappingProxyType(dict(zip(sampling.bias_ids.tolist(), sampling.bias_values.tolist(), strict=True)))
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        allowed_ids=None if sampling.allowed_ids is None else tuple(sampling.allowed_ids.tolist()),
        logit_bias=bias,
        seed=seed,
        sample_index=sample_index,
        segment=segment,
    )


def stop_rule(sampling: Sampling, eos_ids: tuple[int, ...]) -> StopRule:
    """The checkpoint's EOS list and the request's stop ids add up; `ignore_eos` leaves the first out."""
    return _stop_rule(sampling.stop_ids, sampling.stop, () if sampling.ignore_eos else eos_ids)


@lru_cache(maxsize=256)
def _stop_rule(stop_ids: tuple[int, ...], stop: tuple[str, ...], eos_ids: tuple[int, ...]) -> StopRule:
    """Most trajectories have the same, which then crosses to the engine once."""
    return StopRule(ids=frozenset(stop_ids).union(eos_ids), strings=tuple(text.encode() for text in stop))
