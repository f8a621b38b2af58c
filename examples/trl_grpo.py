"""TRL's GRPOTrainer with its rollouts made by a worker over ZeroMQ, on the CPU.

python -m examples.trl_grpo [--steps N] [--address tcp://...]

Before each step the trainer's weights are pushed to the worker, which starts with other ones. TRL itself compares the
worker's logprobs with its own (`sampling/sampling_logp_difference`): this program fails if they differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from examples.trl_tiny import OBSERVATION, letters, make_dataset, make_model, make_tokenizer, save
from rollout.client import RolloutClient
from rollout.integrations.trl import GRPORollouts
from rollout.local import local_worker

TOLERANCE = 1e-4
"""The largest difference allowed between the worker's logprobs and TRL's, both in float32."""


def reward(
    completions: Sequence[Sequence[dict[str, str]]], worker_status: Sequence[str], **_: Any
) -> list[float | None]:
    """One reward a completion, of its text, in which TRL includes what the environment said. None: TRL leaves it out
    of its group's mean; it failed, which is no 0."""
    return [
        letters(messages[-1]["content"]) if status in ("completed", "truncated") else None
        for messages, status in zip(completions, worker_status, strict=True)
    ]


def train(client: RolloutClient, folder: Path, steps: int) -> list[dict[str, float]]:
    """TRL's own log, an entry a step."""
    tokenizer = make_tokenizer()
    rollouts = GRPORollouts(
        client,
        script=[tokenizer.encode(OBSERVATION)],  # two turns; an environment of your own goes here by its name
    )
    trainer = GRPOTrainer(
        model=make_model(tokenizer, seed=0),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=16,  # of each turn
            temperature=0.8,
            max_steps=steps,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=make_dataset(),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    rollouts.attach(trainer)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.trl_grpo", description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--address", help="of a running worker that serves this model; else one is started")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny, and the worker wants a core too
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trl-grpo-")))
        address = options.address
        if address is None:
            start = save(make_tokenizer(), seed=1, folder=folder / "start")
            worker = local_worker(start, device="cpu", log_level="warning", environment={"OMP_NUM_THREADS": "1"})
            address = stack.enter_context(worker).address
        client = stack.enter_context(RolloutClient(address))
        history = train(client, folder / "trl", options.steps)
        print(f"the worker serves version {client.status().weight_version}")
    return verdict(history)


def verdict(history: Sequence[dict[str, float]]) -> int:
    failures = []
    for step, entry in enumerate(history, start=1):
        difference, gradient = entry["sampling/sampling_logp_difference/max"], entry["grad_norm"]
        print(
            f"step {step}: reward {entry['reward']:.3f}, logprobs differ by {difference:.1e}, gradient {gradient:.3f}"
        )
        if not difference <= TOLERANCE:
            failures.append(f"step {step}: logprobs of worker and trainer differ by {difference:.1e}")
        if not gradient > 0 and entry["frac_reward_zero_std"] < 1:  # samples of a group that did alike teach nothing
            failures.append(f"step {step}: the gradient is {gradient}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
