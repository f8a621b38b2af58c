"""Agents whose tools take their time: `code_localization` on the CPU, a tiny model, exponential waits between turns.

    python -m bench.agents [--shrink 8] [--wait 1.0] [--seed 0]

Every trajectory goes at its own pace. What a scheduler can win is seen beside two floors: the longest trajectory's
waits alone, and what the engine would take for the same tokens without any waits (`--wait 0`).
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.environment import PLUGIN, forced
from bench.make_model import make_model
from bench.workloads import Job, Workload, jobs, workloads
from engine.config import BLOCK_SIZE
from rollout.client import Group, RolloutClient, Trajectory
from rollout.local import local_worker


@dataclass(frozen=True, slots=True)
class Outcome:
    """wall_s: from submit to the last result. longest_wait_s: of one trajectory's tools. waited: share of all the
    trajectories' time that was spent in tools. kept: share of the whole blocks that a later turn found in the cache."""

    trajectories: int
    sampled: int
    wall_s: float
    longest_wait_s: float
    waited: float
    kept: float


def replay(client: RolloutClient, workload: Workload, wait_s: float, seed: int = 0) -> Outcome:
    found = jobs(workload, seed)
    groups = [group(client, workload, job, wait_s) for job in found if job.sample == 0]
    began = time.perf_counter()
    ended = list(client.submit(groups))
    wall = time.perf_counter() - began
    lengths = {job.id: [turn.sampled for turn in job.turns] for job in found}
    for trajectory in ended:
        if not trajectory.ok or [turn.length for turn in trajectory.turns] != lengths[trajectory.trajectory_id]:
            raise RuntimeError(f"{trajectory.trajectory_id} is not what was asked for: {trajectory} {trajectory.error}")
    return summary(ended, wall)


def group(client: RolloutClient, workload: Workload, job: Job, wait_s: float) -> Group:
    vocab_size = client.connect().model.vocab_size
    return client.group(
        job.appended(0, vocab_size),
        workload.samples,
        trajectory_ids=[f"{job.group}.{sample}" for sample in range(workload.samples)],
        max_tokens=job.turns[0].sampled,
        temperature=workload.temperature,
        seed=job.seed,
        ignore_eos=True,
        environment=forced(job, wait_s),
    )


def summary(ended: Sequence[Trajectory], wall: float) -> Outcome:
    tools = [trajectory.times.tool_wait for trajectory in ended]
    pairs = [pair for trajectory in ended for pair in itertools.pairwise(trajectory.turns)]
    blocks = sum((before.start + before.length) // BLOCK_SIZE * BLOCK_SIZE for before, _ in pairs)
    return Outcome(
        trajectories=len(ended),
        sampled=sum(int(trajectory.loss_mask.sum()) for trajectory in ended),
        wall_s=wall,
        longest_wait_s=max(tools),
        waited=sum(tools) / sum(trajectory.wall_s for trajectory in ended),
        kept=sum(turn.cached_tokens for _, turn in pairs) / max(1, blocks),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agents", description=__doc__)
    parser.add_argument("--shrink", type=int, default=8, help="divides lengths and the number of groups (default 8)")
    parser.add_argument("--wait", type=float, default=1.0, help="mean seconds of a tool (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    workload = workloads()["code_localization"].shrunk(options.shrink)
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        make_model("tiny", Path(folder))
        context = workload.longest + 16
        with (
            local_worker(folder, env=[PLUGIN], max_context=context, log_level="warning") as worker,
            RolloutClient(worker.address) as client,
        ):
            outcome = replay(client, workload, options.wait, options.seed)
    print(
        f"{workload.name}: {outcome.trajectories} trajectories, {outcome.sampled} sampled tokens in "
        f"{outcome.wall_s:.1f} s: {outcome.sampled / outcome.wall_s:.0f} tokens/s, "
        f"{outcome.trajectories / outcome.wall_s:.2f} trajectories/s\n"
        f"tools: {outcome.longest_wait_s:.1f} s in the slowest trajectory, {outcome.waited:.0%} of all their time; "
        f"later turns found {outcome.kept:.1%} of the blocks before them in the cache"
    )


if __name__ == "__main__":
    main()
