"""Cuts against the law's own sorting, as sets of ids that stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels.cut import ALL, PIECE, Cuts, find_cuts
from engine.sampling import law

VOCAB = PIECE + 300
TEMPERATURES = (1.0, 0.3, 2.0, 1.0, 0.7, 1e-6)


def logits_of(rows: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5)) * spread


def cuts_of(device: torch.device, logits: torch.Tensor, t: Any, top_k: Any, top_p: Any) -> Cuts:
    k, p = (np.array(values, np.float64) for values in (top_k, top_p))
    temperature = torch.tensor(t, dtype=torch.float32)
    arrays = (each.to(device) for each in (logits, temperature, torch.from_numpy(k), torch.from_numpy(p)))
    cuts = find_cuts(*arrays, any_k=bool((k > 0).any()), any_p=bool((p < 1).any()))
    return Cuts(*(getattr(cuts, name).cpu() for name in ("tops", "depth", "ties", "tied")))


def stays(cuts: Cuts, logits: torch.Tensor, t: Any) -> torch.Tensor:
    """bool[S, V], from nothing but the cuts and the logits."""
    temperature = torch.tensor(t, dtype=torch.float32)[:, None]
    bits = ((cuts.tops[:, None] - logits) / temperature).view(torch.int32)
    at = bits == cuts.depth[:, None]
    return (bits < cuts.depth[:, None]) | (at & (at.cumsum(-1) <= cuts.ties[:, None]))


def scaled(logits: torch.Tensor, t: Any) -> torch.Tensor:
    return law.scale(logits, logits.amax(-1), torch.tensor(t, dtype=torch.float32)[:, None])


def test_top_k_keeps_what_sorting_keeps(device: torch.device) -> None:
    logits, top_k = logits_of(6), [1, 20, VOCAB - 1, 0, 300, 2]
    cuts = cuts_of(device, logits, TEMPERATURES, top_k, np.ones(6))
    kept = stays(cuts, logits, TEMPERATURES)
    for row, k in enumerate(top_k):
        if k:
            one = scaled(logits[row : row + 1], TEMPERATURES[row : row + 1])
            assert torch.equal(kept[row], law.keep_top_k(one, torch.tensor([k]), k)[0].isfinite()), row
    assert (int(cuts.depth[3]), int(cuts.ties[3])) == (ALL, ALL)
    assert kept[3].all()


@pytest.mark.parametrize("spread", [0.01, 3.0, 12.0])
def test_top_p_keeps_what_sorting_keeps(device: torch.device, spread: float) -> None:
    """But for ids whose place at the edge is within the rounding of sums taken in another order."""
    logits, top_p = logits_of(5, spread), [0.9, 0.5, 1e-9, 1.0, 0.999]
    t = TEMPERATURES[:5]
    kept = stays(cuts_of(device, logits, t, np.zeros(5), top_p), logits, t)
    weights = scaled(logits, t).double().exp()
    for row, p in enumerate(top_p):
        if p == 1:
            assert kept[row].all()
            continue
        one = scaled(logits[row : row + 1], t[row : row + 1])
        wanted = law.keep_top_p(one, torch.tensor([p], dtype=torch.float64))[0].isfinite()
        differs = kept[row] != wanted
        assert weights[row][differs].sum() <= 3e-6 * weights[row].sum(), (row, int(differs.sum()))
        assert kept[row].any()


def test_top_p_takes_its_share_of_what_top_k_left(device: torch.device) -> None:
    logits, t = logits_of(3, 1.0), [1.0, 0.8, 1.0]
    kept = stays(cuts_of(device, logits, t, [50, 0, 50], [0.8, 0.8, 1.0]), logits, t)
    one = law.keep_top_k(scaled(logits[:1], t[:1]), torch.tensor([50]), 50)
    assert torch.equal(kept[0], law.keep_top_p(one, torch.tensor([0.8], dtype=torch.float64))[0].isfinite())
    assert kept[0].sum() < 50
    assert kept[2].sum() == 50
    assert kept[1].sum() > 50


def test_of_equal_ids_top_p_keeps_the_lowest_and_top_k_all(device: torch.device) -> None:
    logits = torch.full((2, VOCAB), -30.0)
    tied = torch.arange(100, VOCAB, PIECE // 4)
    logits[:, tied] = 1.0
    kept = stays(cuts_of(device, logits, [1.0, 1.0], [3, 0], [1.0, 0.5]), logits, [1.0, 1.0])
    assert kept[0].nonzero()[:, 0].tolist() == tied.tolist()
    assert kept[1].nonzero()[:, 0].tolist() == tied[: -(-len(tied) // 2)].tolist()


def test_ids_that_are_not_allowed_never_count(device: torch.device) -> None:
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, 5:9] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    kept = stays(cuts_of(device, logits, [1.0, 1.0], [2, 0], [1.0, 0.999999]), logits, [1.0, 1.0])
    assert kept[0].nonzero()[:, 0].tolist() == [7, 8]
    assert kept[1].nonzero()[:, 0].tolist() == [5, 6, 7, 8]


def test_a_cut_depends_on_its_row_alone(device: torch.device) -> None:
    logits = logits_of(4)
    alone = cuts_of(device, logits[2:3], [0.9], [40], [0.95])
    among = cuts_of(device, logits, [1.0, 0.2, 0.9, 3.0], [0, 7, 40, 0], [0.4, 1.0, 0.95, 1.0])
    assert (int(alone.depth[0]), int(alone.ties[0])) == (int(among.depth[2]), int(among.ties[2]))
