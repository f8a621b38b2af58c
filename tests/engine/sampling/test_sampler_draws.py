"""The frequencies of what is sampled are the law's."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from engine.request import SamplingParams
from engine.sampling import noise
from tests.engine.sampling.laws import LAWS, VOCAB, expected, logits_of, sampler_of, step


@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_the_law(name: str) -> None:
    draws = 20_000
    params, logits = LAWS[name], logits_of(1)
    # One slot in many rows: all see its counts before this step, each has its own position.
    sampler = sampler_of([replace(params, seed=1000)])
    slots, positions = np.zeros(draws, np.int32), np.arange(draws, dtype=np.int32)
    tokens = sampler.sample(logits.expand(draws, -1), slots, positions).token_ids
    observed = np.bincount(tokens.numpy(), minlength=VOCAB)
    probabilities = np.exp(expected(params, logits[0]).processed)
    assert observed[probabilities == 0].sum() == 0
    rare = probabilities * draws < 5
    bins = np.append(observed[~rare], observed[rare].sum()), np.append(probabilities[~rare], probabilities[rare].sum())
    keep = bins[1] > 0
    assert scipy.stats.chisquare(bins[0][keep], bins[1][keep] * draws).pvalue > 1e-3


@pytest.mark.parametrize("varied", ["seed", "seed_high", "sample_index", "segment"])
def test_draws_follow_the_law_whatever_part_of_the_key_varies(varied: str) -> None:
    slots, logits = 4000, logits_of(1)
    key = {"seed_high": lambda i: {"seed": i << 32}}.get(varied, lambda i: {varied: i})
    sampler = sampler_of([replace(LAWS["plain"], **key(i)) for i in range(slots)])
    tokens = step(sampler, logits.expand(slots, -1), list(range(slots))).token_ids
    observed = np.bincount(tokens.numpy(), minlength=VOCAB)
    probabilities = np.exp(expected(LAWS["plain"], logits[0]).processed)
    assert scipy.stats.chisquare(observed, probabilities / probabilities.sum() * slots).pvalue > 1e-3


def peaked(vocab: int, tail: float) -> torch.Tensor:
    """One id, 7, has all but `tail`, the others share that evenly."""
    logits = torch.full((1, vocab), float(np.log(tail / (vocab - 1))))
    logits[0, 7] = float(np.log(1 - tail))
    return logits


def test_the_tail_of_a_peaked_row_is_as_frequent_as_it_should_be() -> None:
    draws, rows, vocab, tail = 1_000_000, 20_000, 16, 0.01
    sampler, slots = sampler_of([SamplingParams(seed=3)], vocab), np.zeros(rows, np.int32)
    observed = np.zeros(vocab, np.int64)
    for first in range(0, draws, rows):
        positions = np.arange(first, first + rows, dtype=np.int32)
        tokens = sampler.sample(peaked(vocab, tail).expand(rows, -1), slots, positions).token_ids
        observed += np.bincount(tokens.numpy(), minlength=vocab)
    assert scipy.stats.binomtest(draws - int(observed[7]), draws, tail).pvalue > 1e-3
    assert scipy.stats.chisquare(np.delete(observed, 7)).pvalue > 1e-3


NEAR_ONE = [(454, 48_947), (1239, 71_466), (1292, 150_212)]
"""(position, id) under seed 0 and V = 151,936 whose word is above 2^32 - 128, so that float32 rounds u to 1."""


@pytest.mark.parametrize(("position", "token"), NEAR_ONE)
def test_a_word_next_to_2_to_the_32_picks_no_tail_id(position: int, token: int) -> None:
    """With -log(u) such an id would have an exponential of 0 and win against anything."""
    vocab = 151_936
    assert int(noise.words(torch.tensor([[0, 0, 0, 0, position]]), vocab)[0, token]) >= 2**32 - 128
    logits = torch.zeros(1, vocab)
    logits[0, 5] = 24.0  # p = 1 - 6e-6
    assert step(sampler_of([SamplingParams()], vocab), logits, [0], position).token_ids.tolist() == [5]


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_the_tail_of_a_peaked_row_over_the_real_vocabulary() -> None:
    draws, rows, vocab, tail = 10_000, 4, 151_936, 0.01
    sampler, slots = sampler_of([SamplingParams(seed=3)], vocab), np.zeros(rows, np.int32)
    logits = peaked(vocab, tail).expand(rows, -1)
    parts = [
        sampler.sample(logits, slots, np.arange(first, first + rows, dtype=np.int32)).token_ids
        for first in range(0, draws, rows)
    ]
    tokens = torch.cat(parts).numpy()
    others = tokens[tokens != 7]
    assert scipy.stats.binomtest(len(others), draws, tail).pvalue > 1e-3
    # They are spread evenly over the vocabulary.
    assert scipy.stats.kstest(others / vocab, "uniform").pvalue > 1e-3
