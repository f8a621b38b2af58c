"""What watching costs: tokens/s of a worker with metrics and logs on, and of one that nobody watches.

    python -m bench.metrics [--pairs 20] [--trajectories 256]

Two workers of their own processes over the same small random model on the CPU are given the same rounds in turn: on,
off, off, on, ... so that a machine that slows down slows down both. On: the metrics file, W&B offline, the port, logs
at their default level. Off: bench/unwatched.py. The model is so small that the host's work is as large a share of a
step as it will ever be. Printed are the medians over pairs and their bootstrap intervals, of tokens/s and, for machines
that have other work too, of tokens per CPU second of the worker's process. The exit code is 1 where the median cost in
tokens/s is above one per cent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.make_model import make_model
from rollout.client import RolloutClient, turn

START_S = 120.0
STOP_S = 30.0
TURN, OBSERVATION, PROMPT, GROUP = 32, 8, 32, 8
"""Tokens, and samples of one prompt; each trajectory has two turns."""
LIMIT = 0.01


@dataclass(frozen=True)
class Speed:
    """Of one round. wall, cpu: sampled tokens by seconds at the client, and by CPU seconds of the worker."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Running:
    client: RolloutClient
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def worker(module: str, checkpoint: Path, folder: Path, *options: str) -> Iterator[Running]:
    folder.mkdir()
    ready = folder / "ready.json"
    given = ["--weights", str(checkpoint), "--bind", "tcp://127.0.0.1:0", "--ready-file", str(ready)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *given, "--max-running", "64", "--max-context", "256", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"WANDB_DIR": str(folder)},
        )
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.05)
        with RolloutClient(json.loads(ready.read_text())["address"]) as client:
            yield Running(client, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(STOP_S)


def speed(running: Running, trajectories: int, seed: int) -> Speed:
    """Raises RuntimeError where a length is wrong."""
    client = running.client
    prompts = np.random.default_rng(seed).integers(2, 500, (trajectories // GROUP, PROMPT))
    observation = list(range(2, 2 + OBSERVATION))
    groups = [
        client.group(
            prompt, GROUP, max_tokens=TURN, seed=seed, ignore_eos=True, script=[turn(observation)], on_length="continue"
        )
        for prompt in prompts.tolist()
    ]
    start, before = time.perf_counter(), running.cpu_s()
    ended = client.submit(groups, step=seed).results()
    seconds, cpu = time.perf_counter() - start, running.cpu_s() - before
    tokens = sum(one.length for t in ended for one in t.turns)
    if tokens != len(groups) * GROUP * 2 * TURN:
        raise RuntimeError(f"{tokens} tokens were sampled")
    return Speed(tokens / seconds, tokens / cpu)


def pairs(on: Running, off: Running, count: int, trajectories: int) -> Iterator[tuple[Speed, Speed]]:
    """(on, off) of each pair, after one that warms up."""
    for seed in range(count + 1):
        order = (on, off) if seed % 2 else (off, on)
        found = {id(running): speed(running, trajectories, seed) for running in order}
        if seed:
            yield found[id(on)], found[id(off)]


def cost(found: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Share of speed that is lost: its median over pairs, and the 95 % bootstrap interval of that."""
    lost = np.array([1 - on / off for on, off in found])
    draws = np.random.default_rng(0).choice(lost, (10_000, len(lost)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(lost)), float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--trajectories", type=int, default=256, help="in a round")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-metrics-")))
        make_model("tiny", folder / "model")
        options = ("--metrics-file", str(folder / "m.jsonl"), "--metrics-port", "0")
        wandb = ("--wandb-project", "bench", "--wandb-mode", "offline")
        on = stack.enter_context(worker("rollout", folder / "model", folder / "on", *options, *wandb))
        off = stack.enter_context(worker("bench.unwatched", folder / "model", folder / "off"))
        found = []
        for seen, free in pairs(on, off, args.pairs, args.trajectories):
            found.append((seen, free))
            print(f"on {seen.wall:9,.0f}  off {free.wall:9,.0f} tokens/s", flush=True)
    wall = cost([(seen.wall, free.wall) for seen, free in found])
    cpu = cost([(seen.cpu, free.cpu) for seen, free in found])
    for what, (lost, low, high) in (("s", wall), ("CPU s", cpu)):
        print(f"lost {lost:+.2%} of tokens/{what} (median of {len(found)} pairs, 95 % {low:+.2%} to {high:+.2%})")
    return int(wall[0] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
