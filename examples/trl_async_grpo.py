"""TRL's AsyncGRPOTrainer with its rollouts made by a worker over ZeroMQ while it trains, on the CPU.

python -m examples.trl_async_grpo [--steps N] [--address tcp://...]

TRL means this trainer for GPUs and for vLLM. `on_the_cpu` names the two places of it that ask for a GPU, and what
stands in for them here; a GPU node needs neither. `token_budget` is set, or TRL would ask a vLLM server for it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from engine.weights.update import weights_digest
from examples.trl_tiny import OBSERVATION, letters, make_dataset, make_tokenizer, save
from rollout.client import RolloutClient, Trajectory
from rollout.integrations.trl import AsyncRollouts, WorkerWeights
from rollout.local import local_worker

TOLERANCE = 1e-4
"""How far the first step's mean probability ratio may be from 1: nothing has been trained yet."""


def train(client: RolloutClient, start: Path, folder: Path, steps: int) -> AsyncGRPOTrainer:
    tokenizer = make_tokenizer()
    args = AsyncGRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=16,  # of each turn
        temperature=0.8,
        token_budget=0,
        max_steps=steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )

    def reward(trajectory: Trajectory, row: Mapping[str, Any]) -> float:  # noqa: ARG001
        return letters(tokenizer.decode(trajectory.response_ids[trajectory.response_mask == 1]))

    dataset = make_dataset()
    trainer = AsyncGRPOTrainer(
        model=str(start),
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=AsyncRollouts(
            client,
            args,
            dataset,
            tokenizer,
            reward=reward,
            script=[tokenizer.encode(OBSERVATION)],  # two turns; an environment of your own goes here by its name
        ),
        weight_transfer=WorkerWeights(client),
    )
    trainer.train()
    return trainer


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Its attention is a kernel for NVIDIA's Hopper, fetched from a hub; its peak speed is looked up by GPU name."""
    with (
        patch(
            "trl.experimental.async_grpo.packing._flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
        ),
        patch("trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device", lambda *_: None),
    ):
        yield


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    *_: Any,
    softmax_scale: float | None,
    **__: Any,
) -> Tensor:
    """[tokens, heads, head size]: causal attention of each sequence, whose queries are the last of its positions."""
    pieces = []
    bounds = zip(starts_q.tolist(), starts_q.tolist()[1:], starts_k.tolist(), starts_k.tolist()[1:], strict=False)
    for q0, q1, k0, k1 in bounds:
        q, k, v = (x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        piece = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        pieces.append(piece[0].transpose(0, 1))
    return torch.cat(pieces)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.trl_async_grpo", description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--address", help="of a running worker that serves this model; else one is started")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the worker wants a core too
    with ExitStack() as stack:
        stack.enter_context(on_the_cpu())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trl-async-grpo-")))
        start = save(make_tokenizer(), seed=0, folder=folder / "start")
        address = options.address
        if address is None:
            other = save(make_tokenizer(), seed=1, folder=folder / "other")
            worker = local_worker(other, device="cpu", log_level="warning", environment={"OMP_NUM_THREADS": "1"})
            address = stack.enter_context(worker).address
        client = stack.enter_context(RolloutClient(address))
        trainer = train(client, start, folder / "trl", options.steps)
        difference = largest_difference(client, trainer)
        same = client.status().weight_digest == weights_digest(dict(trainer.model.named_parameters()))
    return verdict([entry for entry in trainer.state.log_history if "ratio" in entry], difference, same)


def largest_difference(client: RolloutClient, trainer: AsyncGRPOTrainer) -> float:
    """Between the logprobs that the worker and the trainer's own model give to a text, both at their last weights."""
    ids = trainer.processing_class.encode("the same weights at both ends")
    (served,) = client.score([ids]).logprobs["processed"]
    model = trainer.model.eval()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        table = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    trained = table.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    return float((torch.from_numpy(served[1:].copy()) - trained).abs().max())


def verdict(history: Sequence[dict[str, float]], difference: float, same: bool) -> int:
    for step, entry in enumerate(history, start=1):
        print(
            f"step {step}: reward {entry['reward']:.3f}, ratio {entry['ratio']:.6f}, gradient {entry['grad_norm']:.3f},"
            f" staleness {entry['sample/staleness_mean']:.2f}"
        )
    print("at the end the worker serves", "the trainer's weights" if same else "other weights")
    print(f"its logprobs differ from the trainer's by {difference:.1e}")
    failures = []
    if not abs(history[0]["ratio"] - 1) <= TOLERANCE:
        failures.append(f"the first step's ratio is {history[0]['ratio']}")
    if not same:
        failures.append("worker and trainer have ended with different weights")
    if not difference <= TOLERANCE:
        failures.append(f"their logprobs differ by {difference:.1e}")
    failures += [f"step {i} has no gradient" for i, entry in enumerate(history, start=1) if not entry["grad_norm"] > 0]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
