"""The law of docs/sampling.md once more: one row, numpy float64, plain loops. Shares no code with engine/."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.request import SamplingParams


@dataclass(frozen=True)
class Reference:
    """Log-probabilities float64[V] of each mode; `chosen` are the processed log-weights an argmax would look at.

    margin: how far the nearest filter decision is from its threshold (relative mass or log-weight); below 1e-5 a
    float32 computation may rightly decide the other way.
    """

    processed: np.ndarray
    temperature: np.ndarray
    raw: np.ndarray
    chosen: np.ndarray
    margin: float

    @property
    def modes(self) -> np.ndarray:
        return np.stack((self.processed, self.temperature, self.raw))


def log_softmax(weights: np.ndarray) -> np.ndarray:
    shifted = weights - weights.max()
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum())


def reference(
    logits: np.ndarray, params: SamplingParams, token_ids: Sequence[int] = (), sampled: Sequence[bool] = ()
) -> Reference:
    """token_ids: the sequence before the token; sampled: which of them were sampled."""
    z = logits.astype(np.float64)
    raw = log_softmax(z)
    edited = z.copy()
    if params.allowed_ids is not None:
        forbidden = np.ones(len(z), bool)
        forbidden[list(params.allowed_ids)] = False
        edited[forbidden] = -np.inf
    for token, bias in params.logit_bias.items():
        edited[token] += bias
    for token in set(token_ids):
        factor = 1 / params.repetition_penalty if edited[token] > 0 else params.repetition_penalty
        edited[token] *= factor
    times = Counter(token for token, was in zip(token_ids, sampled, strict=True) if was)
    for token, count in times.items():
        edited[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return Reference(raw, raw, raw, edited, np.inf)

    t = (edited - edited.max()) / params.temperature
    margin = np.inf
    kept = np.isfinite(t)
    if params.top_k and params.top_k < len(t):
        kth = np.sort(t)[::-1][params.top_k - 1]
        kept &= t >= kth
    if params.top_p < 1:
        order = sorted(np.flatnonzero(kept), key=lambda i: (-t[i], i))
        mass = np.cumsum(np.exp(t[order]))
        wanted = params.top_p * mass[-1]
        count = int(np.searchsorted(mass, wanted)) + 1
        margin = min(margin, np.abs(mass / mass[-1] - params.top_p).min())
        kept = np.zeros(len(t), bool)
        kept[order[:count]] = True
    if params.min_p > 0:
        margin = min(margin, np.abs(t[kept] - np.log(params.min_p)).min())
        kept &= t >= np.log(params.min_p)
    chosen = np.where(kept, t, -np.inf)
    return Reference(log_softmax(chosen), log_softmax(z / params.temperature), raw, chosen, margin)
