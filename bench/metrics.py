"""What watching costs: tokens/s of a worker with metrics and logs on, and of one that nobody watches.

    python -m bench.metrics [--minutes 6] [--pairs 10] [--trajectories 256]

Two workers of their own processes over the same small random model on the CPU are given the same rounds in turn: on,
off, off, on, ... so that a machine that slows down slows down both. On: the metrics file, W&B offline, the port (read
once a round), logs at their default level. Off: bench/unwatched.py. The model is so small that the host's work is as
large a share of a step as it will ever be. Two processes of the same code differ for as long as they live, by where
their memory lies, so that after `--pairs` pairs both are started anew, until `--minutes` are over: how many pairs there
are depends on the machine's speed alone.

Printed are the medians over all pairs and their 95 % intervals (bootstrap over starts, and over the pairs of each), of
tokens/s and, for machines that have other work too, of tokens per CPU second of the worker's process. The exit code is
0 where the whole interval of tokens/s is below one per cent; else 1, and the last line says whether it costs more or
the machine was too noisy to tell.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
STARTS = 3
"""At least."""
DRAWS = 4_000


@dataclass(frozen=True)
class Speed:
    """Of one round. wall, cpu: sampled tokens by seconds at the client, and by CPU seconds of the worker."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Running:
    """url: of its metrics; '' where it has none."""

    client: RolloutClient
    process: psutil.Process
    url: str

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
        found = re.search(r"metrics at (\S+)", (folder / "log").read_text())
        with RolloutClient(json.loads(ready.read_text())["address"]) as client:
            yield Running(client, psutil.Process(process.pid), found[1] if found else "")
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
    batch = client.submit(groups, step=seed)
    if running.url:
        urllib.request.urlopen(running.url, timeout=START_S).read()
    ended = batch.results()
    seconds, cpu = time.perf_counter() - start, running.cpu_s() - before
    tokens = sum(one.length for t in ended for one in t.turns)
    if tokens != len(groups) * GROUP * 2 * TURN:
        raise RuntimeError(f"{tokens} tokens were sampled")
    return Speed(tokens / seconds, tokens / cpu)


def launch(folder: Path, checkpoint: Path, count: int, trajectories: int) -> list[tuple[Speed, Speed]]:
    """(on, off) of each pair, of two workers that are started for them."""
    folder.mkdir()
    options = ("--metrics-file", str(folder / "m.jsonl"), "--metrics-port", "0")
    wandb = ("--wandb-project", "bench", "--wandb-mode", "offline")
    with (
        worker("rollout", checkpoint, folder / "on", *options, *wandb) as on,
        worker("bench.unwatched", checkpoint, folder / "off") as off,
    ):
        return list(pairs(on, off, count, trajectories))


def pairs(on: Running, off: Running, count: int, trajectories: int) -> Iterator[tuple[Speed, Speed]]:
    """(on, off) of each pair, after one that warms up."""
    for seed in range(count + 1):
        order = (on, off) if seed % 2 else (off, on)
        found = {id(running): speed(running, trajectories, seed) for running in order}
        if seed:
            yield found[id(on)], found[id(off)]


def cost(found: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """Share of speed that is lost: its median over pairs, and the 95 % bootstrap interval of that.

    found: (on, off) of each start's pairs, equally many. Starts are drawn, then pairs of each.
    """
    lost = np.array([[1 - on / off for on, off in start] for start in found])
    starts, count = lost.shape
    random = np.random.default_rng(0)
    which = random.integers(starts, size=(DRAWS, starts, 1))
    draws = lost[which, random.integers(count, size=(DRAWS, starts, count))]
    low, high = np.percentile(np.median(draws, axis=(1, 2)), [2.5, 97.5])
    return float(np.median(lost)), float(low), float(high)


def verdict(lost: float, high: float) -> str:
    if high < LIMIT:
        return f"metrics and logs cost less than {LIMIT:.0%} of tokens/s, at 95 % confidence"
    if lost < LIMIT:
        return f"not shown: the interval reaches {high:.2%}; a quieter machine or more --minutes narrow it"
    return f"metrics and logs cost more than {LIMIT:.0%} of tokens/s, as far as this machine can tell"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0, help="no workers are started after that")
    parser.add_argument("--pairs", type=int, default=10, help="of rounds, by two workers before others are started")
    parser.add_argument("--trajectories", type=int, default=256, help="in a round")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    found: list[list[tuple[Speed, Speed]]] = []
    with tempfile.TemporaryDirectory(prefix="bench-metrics-") as temporary:
        folder = Path(temporary)
        make_model("tiny", folder / "model")
        while len(found) < STARTS or time.monotonic() < end:
            found.append(launch(folder / str(len(found)), folder / "model", args.pairs, args.trajectories))
            for seen, free in found[-1]:
                print(f"start {len(found)}: on {seen.wall:9,.0f}  off {free.wall:9,.0f} tokens/s", flush=True)
    wall = cost([[(seen.wall, free.wall) for seen, free in start] for start in found])
    cpu = cost([[(seen.cpu, free.cpu) for seen, free in start] for start in found])
    number = f"{args.pairs * len(found)} pairs of {len(found)} starts"
    for what, (lost, low, high) in (("s", wall), ("CPU s", cpu)):
        print(f"lost {lost:+.2%} of tokens/{what} (median of {number}; 95 % {low:+.2%} to {high:+.2%})")
    print(verdict(wall[0], wall[2]))
    return int(wall[2] >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
