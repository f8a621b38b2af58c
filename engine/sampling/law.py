"""What is sampled from: a row of parameters on the host, and arithmetic on float32 rows of logits [N, V].

Order (docs/sampling.md): allowed ids and logit bias, penalties, (z - max) / T, top-k, top-p, min-p, normalise. Every
function treats its rows independently, takes one value a row for each parameter, and marks a dropped id with -inf.
Nothing here depends on a value on the device: no boolean indexing, no growing tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.request import LOGPROB_MODES, LogprobMode, SamplingParams
from engine.sampling import noise
from engine.sampling.penalties import ANYWHERE, SAMPLED

NEVER = float("-inf")
PROCESSED, TEMPERATURE, RAW = range(len(LOGPROB_MODES))

ROW = np.dtype(
    [
        ("greedy", np.bool_),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("penalised", np.bool_),
        ("offset", np.bool_),
        ("raw", np.bool_),
        ("top", np.int64),
        ("primary", np.int64),
        ("key", np.int64, noise.KEY_WORDS - 1),
    ],
    align=True,  # numpy calls a column of one row contiguous whatever its stride; torch wants whole elements
)
"""One slot's law. A greedy row has temperature 1 and no filter. top_k 0 is off. penalised, offset: the slot has counts,
a row of `offset`. raw: it wants a T = 1 normaliser beside its own. top, primary: how many alternatives, in which mode.
key: the noise key without the position."""

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_KEY_OFF = (0,) * (noise.KEY_WORDS - 1)
NEUTRAL = np.array((False, 1, 0, 1, 0, 1, 0, 0, False, False, False, 0, PROCESSED, _KEY_OFF), ROW)


def row(params: SamplingParams, modes: tuple[LogprobMode, ...], top: int, vocab_size: int) -> npt.NDArray[Any]:
    """A `ROW`: the law of a request that wants `modes` (the first is primary) and `top` alternatives."""
    out = NEUTRAL.copy()
    primary = LOGPROB_MODES.index(modes[0])
    if params.temperature == 0:
        out["greedy"] = True
        primary = TEMPERATURE if primary == PROCESSED else primary
    else:
        # What float32 would round to 0 or to infinity would divide 0 by 0, or -inf (not allowed) by infinity.
        out["temperature"] = min(max(params.temperature, _SMALLEST), _LARGEST)
        out["top_k"] = params.top_k if params.top_k < vocab_size else 0
        out["top_p"] = params.top_p
        out["min_p"] = params.min_p
    if params.has_penalties:
        out["penalised"] = True
        out["repetition"] = params.repetition_penalty
        out["presence"] = params.presence_penalty
        out["frequency"] = params.frequency_penalty
    out["offset"] = params.allowed_ids is not None or len(params.logit_bias) > 0
    out["raw"] = "raw" in modes and out["temperature"] != 1
    out["primary"] = TEMPERATURE if primary == RAW and not out["raw"] else primary
    out["top"] = min(top, vocab_size)
    out["key"] = [word & 0xFFFFFFFF for word in (params.seed, params.seed >> 32, params.sample_index, params.segment)]
    return out


def fill_offset(row: Tensor, allowed_ids: Tensor | None, bias_ids: Tensor, bias: Tensor) -> None:
    """Fill float32[V] with what is added to the logits: the bias, and -inf outside the allowed ids."""
    row.fill_(0.0 if allowed_ids is None else NEVER)
    if allowed_ids is not None:
        row.index_fill_(0, allowed_ids, 0.0)
    row.index_add_(0, bias_ids, bias)


def penalise(logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """counts: int32[N, 2, V]; the penalties: float32[N, 1].

    Repetition (any occurrence) divides a positive logit and multiplies a negative one; then frequency is taken off
    once for every sampled occurrence, and presence once if there is one.
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts[:, ANYWHERE] > 0, repeated, logits)
    sampled = counts[:, SAMPLED]
    return logits - frequency * sampled - presence * (sampled > 0)


def scale(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """(z - max) / T: at most 0, and 0 at the maximum whatever T. largest: float32[N]; temperature: float32[N, 1] > 0.

    The maximum goes first: z / T overflows at T = 1e-38 where (z - max) / T only reaches -inf, a weight of 0.
    """
    return (logits - largest[:, None]) / temperature


def log_normaliser(scaled: Tensor) -> Tensor:
    """float32[N], log of the sum of exp(scaled). Rows reach 0, so that nothing can overflow."""
    return scaled.exp().sum(-1).log()


def keep_top_k(scaled: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """Keep what is not below the k-th largest: ties with it stay. top_k: int64[N] in [1, largest_k <= V]."""
    best = scaled.topk(largest_k, dim=-1).values
    kth = best.gather(1, top_k[:, None] - 1)
    return scaled.masked_fill(scaled < kth, NEVER)


def keep_top_p(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest most likely ids whose mass reaches top_p of what is there; of equal ids the lowest first.

    top_p: float64[N] in (0, 1). The running mass is float64, so that its error stays far below one id's mass.
    """
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    mass = ordered.exp().to(torch.float64).cumsum(-1)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    keep[:, 1:] = mass[:, :-1] < top_p[:, None] * mass[:, -1:]
    return scaled.masked_fill(~torch.zeros_like(keep).scatter_(1, ids, keep), NEVER)


def keep_min_p(scaled: Tensor, min_p: Tensor) -> Tensor:
    """Keep ids at least min_p times as likely as the most likely one. min_p: float32[N, 1] in (0, 1]."""
    return scaled.masked_fill(scaled.exp() < min_p, NEVER)


def best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, best first, lowest id first on ties: ids int64[N, k], values float32[N, k].

    `topk` alone leaves the order of ties open; here value and id are compared as one integer.
    """
    vocab = values.shape[-1]
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    places = torch.arange(vocab - 1, -1, -1, device=values.device)
    top = (ordered * 2**32 + places).topk(count, dim=-1).values
    ids = vocab - 1 - (top & 0xFFFFFFFF)
    return ids, values.gather(1, ids)
