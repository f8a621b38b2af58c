"""The plain sampler over a real vocabulary, in numbers that only a GPU draws in seconds."""

from __future__ import annotations

import math

import torch

from engine.kernels.sample import sample
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
