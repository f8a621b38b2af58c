"""GRPO on trajectories as the worker returns them.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (2024), section 4.1,
without the KL term to a reference model: this agent starts from random weights, there is nothing to stay close to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.client import Trajectory


@dataclass(frozen=True)
class Batch:
    """B trajectories, padded on the right to the longest, L tokens.

    ids: int64[B, L]. mask: float32[B, L - 1], 1 on the tokens to train on: what the model sampled, never what the
    environment said. old_logprobs: float32[B, L - 1], what the worker sampled them with. advantages: float32[B].
    Column i of the last two speaks about token i + 1, the first one that the model could have predicted.
    """

    ids: Tensor
    mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor


def make_batch(groups: Sequence[Sequence[Trajectory]]) -> Batch:
    """Raises ValueError when no trajectory was scored."""
    members, advantages = [], []
    for group in groups:
        # A trajectory that failed or was aborted has no reward. It is no zero: it must not pull the mean down.
        scored = [(trajectory, trajectory.reward) for trajectory in group if trajectory.reward is not None]
        if scored:
            members += [trajectory for trajectory, _ in scored]
            advantages.append(group_advantages([reward for _, reward in scored]))
    if not members:
        raise ValueError("no trajectory was scored")
    return Batch(
        ids=pad([trajectory.token_ids for trajectory in members], torch.int64),
        mask=pad([trajectory.loss_mask for trajectory in members], torch.float32)[:, 1:],
        old_logprobs=pad([trajectory.logprobs for trajectory in members], torch.float32)[:, 1:],
        advantages=torch.cat(advantages),
    )


def group_advantages(rewards: Sequence[float]) -> Tensor:
    """float32[n]: how much better each sample did than its siblings. All alike teach nothing: 0."""
    reward = torch.tensor(rewards, dtype=torch.float32)
    return (reward - reward.mean()) / (reward.std(unbiased=False) + 1e-4)


def pad(rows: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    """[B, longest], zeros on the right: with causal attention no token before them sees the padding."""
    padded = np.zeros((len(rows), max(map(len, rows))))
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded).to(dtype)


def next_token_logprobs(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """float32[B, L - 1] of each token given those before it, and the entropy, float32[B, L - 1], at its place."""
    table = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(dim=-1)
    return table.gather(2, ids[:, 1:, None])[:, :, 0], -(table.exp() * table).sum(dim=-1)


@torch.no_grad()
def largest_logprob_difference(model: PreTrainedModel, batch: Batch) -> float:
    """Between the worker's logprobs of the sampled tokens and this model's own, which has the weights that sampled."""
    ours, _ = next_token_logprobs(model, batch.ids)
    return float(((ours - batch.old_logprobs) * batch.mask).abs().max())


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, *, steps: int = 4) -> None:
    """Several steps on one batch; the clipped importance weight keeps the later ones near what was sampled."""
    tokens = batch.mask.sum()
    advantages = batch.advantages[:, None]
    for _ in range(steps):
        logprobs, entropy = next_token_logprobs(model, batch.ids)
        ratio = (logprobs - batch.old_logprobs).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        # A little entropy keeps all numbers in play until each answer has got a meaning.
        loss = -((gain + 0.02 * entropy) * batch.mask).sum() / tokens
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
