"""Prompt logprobs: the head over the tokens of a prefill row, and each next id scored by it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.model import Model, head
from engine.runner.input import Score
from engine.sampling.sampler import Sampler

SCORE_ROWS = 512
"""Rows of the head at a time: bounds the logits held at once."""


def score_prompt(model: Model, sampler: Sampler, score: Score, residual: Tensor) -> Tensor:
    """float32[3, q] in the order of LOGPROB_MODES. residual: dtype[T, hidden] of the whole step."""
    parts = []
    for first in range(0, len(score.targets), SCORE_ROWS):
        targets = score.targets[first : first + SCORE_ROWS]
        start = score.start + first
        logits = head(model, residual[start : start + len(targets)])
        parts.append(sampler.score(logits, score.slot, score.position + first, targets))
    return torch.cat(parts, dim=1)
