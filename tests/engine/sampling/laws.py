"""Laws, logits and samplers that the tests of the sampler share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.request import SamplingParams
from engine.sampling.sampler import Sampled, Sampler
from engine.step import SlotStart
from tests.engine.reference_law import Reference, reference

CPU = torch.device("cpu")
VOCAB = 48
PROMPT = np.array([3, 3, 5, 0, 3, 5, 40], np.int32)
SAMPLED = np.array([False, True, False, False, True, True, True])
MODES = ("processed", "temperature", "raw")

LAWS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=7),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.1),
    "repetition": SamplingParams(repetition_penalty=1.4),
    "presence": SamplingParams(presence_penalty=0.8),
    "frequency": SamplingParams(frequency_penalty=0.3),
    "bias": SamplingParams(logit_bias={3: 1.5, 40: -2.0}),
    "allowed": SamplingParams(allowed_ids=(1, 3, 5, 8, 13)),
    "allowed and biased": SamplingParams(allowed_ids=(1, 3, 5, 8, 13), logit_bias={3: -1.0, 4: 9.0}),
    "filters": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    "all": SamplingParams(
        temperature=1.2,
        top_k=25,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        allowed_ids=(3, 5, *range(0, VOCAB, 2)),
        logit_bias={3: 1.0},
    ),
}
GREEDY = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy penalised": SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5, top_k=3),
}
EVERY = LAWS | GREEDY


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 11) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 1.5


def sampler_of(laws: list[SamplingParams], vocab: int = VOCAB, *, top: int = 0, modes: Any = MODES) -> Sampler:
    sampler = Sampler(vocab, len(laws), CPU)
    for slot, params in enumerate(laws):
        sampler.start(SlotStart(slot, params, PROMPT, SAMPLED, modes, top))
    return sampler


def step(sampler: Sampler, logits: torch.Tensor, slots: list[int], position: int = len(PROMPT)) -> Sampled:
    return sampler.sample(logits, np.array(slots, np.int32), np.full(len(slots), position, np.int32))


def expected(params: SamplingParams, logits: torch.Tensor) -> Reference:
    return reference(logits.numpy(), params, PROMPT.tolist(), SAMPLED.tolist())
