"""The demo's training step: what it trains on, and in which direction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.find_number.environment import HIGHER, START
from examples.find_number.grpo import (
    Batch,
    group_advantages,
    largest_logprob_difference,
    make_batch,
    next_token_logprobs,
    pad,
    train,
)
from examples.find_number.model import make_model
from protocols.fields import SOURCE_OBSERVATION, SOURCE_PROMPT, SOURCE_SAMPLED, Record, Sampling, Segment, Turn
from rollout.client import Trajectory


def trajectory(guesses: list[int], reward: float | None, logprob: float = -2.0) -> Trajectory:
    """START, guess, HIGHER, guess, ..."""
    ids, source = [START], [SOURCE_PROMPT]
    for index, guess in enumerate(guesses):
        ids += [guess] if index == 0 else [HIGHER, guess]
        source += [SOURCE_SAMPLED] if index == 0 else [SOURCE_OBSERVATION, SOURCE_SAMPLED]
    sampled = np.array(source) == SOURCE_SAMPLED
    versions = np.array([[0, len(guesses)]], np.int64)
    segment = Segment(
        token_ids=np.array(ids, np.int32),
        source=np.array(source, np.uint8),
        logprobs=np.where(sampled, logprob, 0).astype(np.float32),
        loss_mask=sampled.astype(np.uint8),
        weight_versions=versions,
        kv_versions=versions,
        turns=tuple(Turn(index=i, start=1 + 2 * i, length=1, finish_reason="length") for i in range(len(guesses))),
    )
    record = Record(
        trajectory_id="t",
        group_id="g",
        batch_id="b",
        sample_index=0,
        status="completed",
        finish_reason="env_done",
        segments=(segment,),
        sampling=Sampling(seed=0),
        reward=reward,
    )
    return Trajectory(record, lambda _: None)


def test_a_batch_is_padded_shifted_and_normalised_by_group() -> None:
    batch = make_batch(
        [[trajectory([6], 1.0), trajectory([1, 2, 3], 0.0)], [trajectory([4, 5], 1.0), trajectory([5, 4], 1.0)]]
    )
    assert batch.ids.tolist()[:2] == [[START, 6, 0, 0, 0, 0], [START, 1, HIGHER, 2, HIGHER, 3]]
    assert batch.mask.tolist()[:2] == [[1, 0, 0, 0, 0], [1, 0, 1, 0, 1]]
    assert batch.old_logprobs.tolist()[1] == [-2, 0, -2, 0, -2]
    torch.testing.assert_close(batch.advantages, torch.tensor([1.0, -1.0, 0.0, 0.0]), atol=1e-3, rtol=0)


def test_what_nobody_scored_is_left_out_and_pulls_no_mean_down() -> None:
    scored = [trajectory([6], 1.0), trajectory([1], 0.0)]
    without, with_failed = make_batch([scored]), make_batch([[*scored, trajectory([2], None)]])
    assert with_failed.ids.tolist() == without.ids.tolist()
    assert with_failed.advantages.tolist() == without.advantages.tolist()
    with pytest.raises(ValueError, match="no trajectory was scored"):
        make_batch([[trajectory([2], None)], []])


def test_advantages_are_zero_where_all_samples_did_alike() -> None:
    assert group_advantages([1.0, 1.0, 1.0]).tolist() == [0, 0, 0]
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0])
    assert advantages.sum().abs() < 1e-5
    assert advantages[0] == pytest.approx(3**0.5, abs=1e-2)


def test_padding_changes_no_logprob() -> None:
    model, rows = make_model(0), [np.array([START, 3, HIGHER, 5]), np.array([START, 1])]
    both, _ = next_token_logprobs(model, pad(rows, torch.int64))
    for row, found in zip(rows, both, strict=True):
        alone, _ = next_token_logprobs(model, pad([row], torch.int64))
        torch.testing.assert_close(found[: len(row) - 1], alone[0], atol=1e-6, rtol=0)


def test_the_difference_counts_sampled_tokens_only() -> None:
    model = make_model(0)
    batch = make_batch([[trajectory([6, 5], 1.0), trajectory([1], 0.0)]])
    exact, _ = next_token_logprobs(model, batch.ids)
    noise = torch.zeros_like(exact)
    noise[0, 1], noise[1, 2] = 9.0, 9.0  # an observation, and padding
    agreeing = Batch(batch.ids, batch.mask, exact.detach() + noise, batch.advantages)
    assert largest_logprob_difference(model, agreeing) == 0
    noise[0, 2] = 0.25
    differing = Batch(batch.ids, batch.mask, exact.detach() + noise, batch.advantages)
    assert largest_logprob_difference(model, differing) == pytest.approx(0.25, abs=1e-6)


def test_training_favours_what_was_rewarded_and_clips() -> None:
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    batch = make_batch([[trajectory([6], 1.0), trajectory([1], 0.0)]])
    old, _ = next_token_logprobs(model, batch.ids)
    train(model, optimizer, Batch(batch.ids, batch.mask, old.detach(), batch.advantages), steps=4)
    new, _ = next_token_logprobs(model, batch.ids)
    ratio = (new - old).exp().detach()[:, 0]
    assert ratio[0] > 1.02
    assert ratio[1] < 0.98

    # Far outside of the clip there is no gradient left but the entropy's, which is small.
    far = Batch(batch.ids, batch.mask, old.detach() - torch.tensor([[5.0], [-5.0]]), batch.advantages)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, torch.optim.SGD(model.parameters(), lr=1.0), far, steps=1)
    moved = max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True))
    near = Batch(batch.ids, batch.mask, new.detach(), batch.advantages)
    train(model, torch.optim.SGD(model.parameters(), lr=1.0), near, steps=1)
    pulled = max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True))
    assert moved < 0.1 * pulled


def test_the_model_is_the_seeds() -> None:
    one, same, other = make_model(3), make_model(3), make_model(4)
    weights = [dict(model.named_parameters())["lm_head.weight"] for model in (one, same, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])
