"""From the wire's `Sampling` to the engine's terms."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from engine.request import SamplingParams, StopRule
from protocols.fields import Sampling


def engine_params(sampling: Sampling, *, seed: int, sample_index: int, segment: int = 0) -> SamplingParams:
    """The law and the noise key of the turns of one segment of a trajectory."""
    bias: dict[int, float] = {}
    if sampling.bias_ids is not None and sampling.bias_values is not None:
        bias = dict(zip(sampling.bias_ids.tolist(), sampling.bias_values.tolist(), strict=True))
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        allowed_ids=None if sampling.allowed_ids is None else tuple(sampling.allowed_ids.tolist()),
        logit_bias=MappingProxyType(bias),
        seed=seed,
        sample_index=sample_index,
        segment=segment,
    )


def stop_rule(sampling: Sampling, eos_ids: Iterable[int]) -> StopRule:
    """The checkpoint's EOS list and the request's stop ids add up; `ignore_eos` leaves the first out."""
    ids = frozenset(sampling.stop_ids)
    return StopRule(
        ids=ids if sampling.ignore_eos else ids.union(eos_ids),
        strings=tuple(stop.encode() for stop in sampling.stop),
    )
