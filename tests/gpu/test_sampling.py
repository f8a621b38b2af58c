"""Draws over a real vocabulary, in numbers that only a GPU makes in seconds."""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.kernels.cut import find_cuts
from engine.kernels.sample import Special, sample
from tests.engine.kernels.test_sample import random_keys

VOCAB = 151_936


def test_the_tail_of_a_peaked_law_is_drawn_as_often_as_it_should() -> None:
    """One id at p = 0.99, the rest share 0.01 evenly: over 1e6 draws within four standard deviations, overall and in
    each quarter of the vocabulary."""
    rows, draws, peak = 250, 1_000_000, 70_000
    logits = torch.full((VOCAB,), math.log(0.01 / (VOCAB - 1)), device="cuda")
    logits[peak] = math.log(0.99)
    logits = logits.expand(rows, VOCAB).contiguous()
    temperature = torch.ones(rows, device="cuda")
    greedy = torch.zeros(rows, dtype=torch.bool, device="cuda")
    slots = torch.arange(rows, device="cuda")
    last_token = torch.zeros(rows, dtype=torch.int64, device="cuda")
    keys = random_keys(rows, 3).cuda()
    quarters = torch.zeros(4, dtype=torch.int64, device="cuda")
    for step in range(draws // rows):
        keys[:, 4] = step
        ids = sample(logits, temperature, greedy, keys, slots, last_token)[0]
        quarters += torch.bincount((ids * 4 // VOCAB)[ids != peak], minlength=4)
    tail = int(quarters.sum())
    assert abs(tail - 0.01 * draws) < 4 * math.sqrt(draws * 0.01 * 0.99)
    for count in quarters.tolist():
        assert abs(count - 0.0025 * draws) < 4 * math.sqrt(draws * 0.0025)


def test_filtered_draws_are_spread_as_the_law_says() -> None:
    """Chi-square of 50,000 draws of 20 ids at temperature 0.8: 19 degrees of freedom, once in 10,000 above 52."""
    rows, draws = 250, 50_000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)).cuda()
    best = logits.topk(20)
    p = (best.values / 0.8).double().softmax(-1).cpu().numpy()
    logits = logits.expand(rows, VOCAB).contiguous()
    temperature = torch.full((rows,), 0.8, device="cuda")
    plain = torch.zeros(rows, dtype=torch.float64, device="cuda")
    cuts = find_cuts(logits, temperature, plain + 20, plain + 1, any_k=True, any_p=False)
    special = Special(logits, cuts, torch.zeros(rows, device="cuda"))
    slots = torch.arange(rows, device="cuda")
    last_token = torch.zeros(rows, dtype=torch.int64, device="cuda")
    keys = random_keys(rows, 4).cuda()
    counts = np.zeros(VOCAB)
    for step in range(draws // rows):
        keys[:, 4] = step
        ids = sample(logits, temperature, plain.bool(), keys, slots, last_token, special)[0]
        counts += np.bincount(ids.cpu().numpy(), minlength=VOCAB)
    found = counts[best.indices.cpu().numpy()]
    assert found.sum() == draws
    assert ((found - draws * p) ** 2 / (draws * p)).sum() < 52
