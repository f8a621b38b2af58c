"""What the examples share: a worker with one environment, a batch of tasks, a table of what came back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from examples.smollm2.fetch import FetchError, smollm2
from rollout.client import RolloutClient, Trajectory
from rollout.local import local_worker

WIDTH = 130
"""Of a table that is not read on a terminal."""
Config = Mapping[str, Any]
Messages = Callable[[Config], Sequence[Mapping[str, str]]]


def play(adapter: str, messages: Messages, configs: Sequence[Config], title: str, **group: Any) -> int:
    """One group for each config. adapter: `module:Class`. group: further arguments of `client.group`."""
    options = parse(title)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        checkpoint = options.checkpoint or smollm2()
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    worker: dict[str, Any] = {"env": [f"task={adapter}"], "max_running": 16, "max_context": 8192}
    with (
        local_worker(checkpoint, log_level="warning", **worker) as served,
        RolloutClient(served.address) as client,
        console.status("the model is at it"),
    ):
        groups = [
            client.group(
                messages=messages(config), n=options.samples, environment="task", config=config, seed=i, **group
            )
            for i, config in enumerate(configs)
        ]
        tasks = {made.id: config for made, config in zip(groups, configs, strict=True)}
        ended = list(client.submit(groups))
    show(ended, tasks, title, AutoTokenizer.from_pretrained(checkpoint), console)
    return 0 if all(trajectory.ok for trajectory in ended) else 1


def show(
    ended: Sequence[Trajectory], tasks: Mapping[str, Config], title: str, tokenizer: Any, console: Console
) -> None:
    table = Table("task", "turns", "sampled", "context", "end", "reward", "parts", "first words", title=title)
    for trajectory in sorted(ended, key=lambda t: (list(tasks).index(t.group_id), t.sample_index)):
        first = trajectory.turns[0]
        said = tokenizer.decode(trajectory.token_ids[first.start : first.start + min(first.length, 16)])
        sampled = int(trajectory.loss_mask.sum())
        table.add_row(
            " ".join(str(value) for value in tasks[trajectory.group_id].values() if not isinstance(value, dict))[:48],
            str(len(trajectory.turns)),
            str(sampled),
            str(len(trajectory.token_ids) - sampled),
            trajectory.finish_reason,
            "-" if trajectory.reward is None else f"{trajectory.reward:.2f}",
            " ".join(f"{name} {value:.2f}" for name, value in trajectory.rewards.items()),
            repr(said)[:40],
        )
    console.print(table)
    rewards = [trajectory.reward for trajectory in ended if trajectory.reward is not None]
    console.print(f"{len(ended)} trajectories, mean reward {np.mean(rewards) if rewards else 0.0:.3f}")


def parse(title: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--samples", type=int, default=2, help="of each task (default 2)")
    parser.add_argument("--checkpoint", type=Path, help="of a chat model; without it SmolLM2-135M-Instruct")
    return parser.parse_args()
