"""What is sampled from, as arithmetic on float32 rows of logits [N, V]; see docs/sampling.md.

Order: allowed ids and logit bias, penalties, (z - max) / T, top-k, top-p, min-p, normalise. Every function treats
its rows independently, takes one value a row for each parameter, and marks a dropped id with -inf.
Nothing here depends on a value on the device: no boolean indexing, no growing tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.penalties import ANYWHERE, SAMPLED

NEVER = float("-inf")


def offset(row: Tensor, allowed_ids: Tensor | None, bias_ids: Tensor, bias: Tensor) -> None:
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
