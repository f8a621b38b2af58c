"""The loop of a trainer: submit groups, train on what comes back, hand the new weights over, again."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from examples.find_number.environment import BLIND, NUMBERS, START
from examples.find_number.grpo import largest_logprob_difference, make_batch, train
from examples.find_number.model import make_model
from examples.find_number.report import Round, progress, write_report
from rollout.client import Group, RolloutClient
from rollout.local import local_worker

ENVIRONMENT = "find_number=examples.find_number.environment:FindNumber"
WORKER: dict[str, Any] = {
    "device": "cpu",  # where the trainer is, in float32 as it is
    "env": [ENVIRONMENT],
    "max_running": 256,  # a whole round fits into one step: its KV is tiny
    "log_level": "warning",
    "environment": {"OMP_NUM_THREADS": "1"},  # and so is the model: threads would only wait for each other
}
"""For `local_worker`: options of the `rollout-worker` command, and its environment variables."""
MARGIN = 0.2
"""How much better than a player who does not listen the agent has to become."""
TOLERANCE = 1e-3
"""The largest difference allowed between the worker's logprobs and the trainer's, both in float32."""


def main() -> int:
    options = parse()
    print(
        f"{options.rounds} rounds of GRPO through a real worker, to find a number of {NUMBERS}. It serves:", flush=True
    )
    torch.set_num_threads(1)  # the model is tiny, and the worker wants a core too
    transformers.logging.disable_progress_bar()  # save_pretrained has one of its own
    model = make_model(options.seed)
    with ExitStack() as stack:
        folder = options.weights_dir or stack.enter_context(temporary_folder())
        checkpoints = Checkpoints(folder)
        start = checkpoints.write(model, 0)
        address = options.address or stack.enter_context(local_worker(start, **WORKER)).address
        client = stack.enter_context(RolloutClient(address))
        rounds = list(progress(learn(client, model, checkpoints, options), options.rounds))
    write_report(rounds, options.out, options.seed)
    return verdict(rounds)


def learn(
    client: RolloutClient, model: PreTrainedModel, checkpoints: Checkpoints, options: argparse.Namespace
) -> Iterator[Round]:
    version = client.connect(timeout=60).weight_version
    if options.address:
        # Somebody else's worker serves weights of its own: make it serve ours.
        version += 1
        client.update_weights(checkpoints.write(model, version), version)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    # Where nearly all play well, the one miss of a group weighs most: a large step then undoes what was learnt.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=options.rounds)
    for number in range(options.rounds):
        started = time.monotonic()
        groups = list(client.submit(make_groups(client, options, number)).groups())
        sampled = time.monotonic()

        batch = make_batch(groups)
        # Before the first step this model and the worker's have the same weights: they have to agree.
        difference = largest_logprob_difference(model, batch)
        train(model, optimizer, batch)
        schedule.step()
        trained = time.monotonic()

        version += 1
        update = client.update_weights(checkpoints.write(model, version), version)
        checkpoints.keep_newest(2)  # a restarted worker asks for the newest once more
        trajectories = [trajectory for group in groups for trajectory in group]
        yield Round(
            number=number,
            reward=float(np.mean([trajectory.reward for trajectory in trajectories if trajectory.reward is not None])),
            unscored=sum(trajectory.reward is None for trajectory in trajectories),
            turns=float(np.mean([len(trajectory.turns) for trajectory in trajectories])),
            tokens=int(batch.mask.sum()),
            logprob_difference=difference,
            weight_version=update.version,
            rollout_s=sampled - started,
            train_s=trained - sampled,
            reload_s=time.monotonic() - trained,
        )


def make_groups(client: RolloutClient, options: argparse.Namespace, number: int) -> list[Group]:
    """One group for each hidden number. The seeds fix the noise; without one the worker draws it."""
    return [
        client.group(
            [START],
            n=options.samples,
            max_tokens=1,
            environment="find_number",
            config={"hidden": hidden},
            seed=(options.seed * options.rounds + number) * NUMBERS + hidden,
        )
        for hidden in range(NUMBERS)
    ]


class Checkpoints:
    """Numbered safetensors directories under one folder. The worker reads them from there, so it must see it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._written: list[Path] = []

    def write(self, model: PreTrainedModel, version: int) -> Path:
        path = self._folder / f"version-{version:04d}"
        model.save_pretrained(path)
        self._written.append(path)
        return path

    def keep_newest(self, count: int) -> None:
        """The worker never deletes what it was handed: that is ours to do."""
        while len(self._written) > count:
            shutil.rmtree(self._written.pop(0))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="find-number-") as folder:
        yield Path(folder)


def verdict(rounds: list[Round]) -> int:
    reward = float(np.mean([r.reward for r in rounds[-5:]]))
    difference = float(np.max([r.logprob_difference for r in rounds]))
    failures = []
    if reward < BLIND + MARGIN:
        failures.append(f"mean reward {reward:.3f} of the last five rounds is below {BLIND + MARGIN:.3f}")
    if not difference < TOLERANCE:
        failures.append(f"logprobs of worker and trainer differ by {difference:.1e}, not below {TOLERANCE:.0e}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.find_number", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of all sampling (default 0)")
    parser.add_argument("--rounds", type=int, default=60, help="of rollout, training and reload (default 60)")
    parser.add_argument("--samples", type=int, default=32, help="trajectories for each hidden number (default 32)")
    parser.add_argument("--out", type=Path, default=Path("runs/find_number"), help="for curve.json and reward.png")
    parser.add_argument("--weights-dir", type=Path, help="for the checkpoints; without it a temporary folder")
    parser.add_argument("--address", help=f"of a running worker, started with --env {ENVIRONMENT}; else one is started")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
