"""The same workloads through a worker over ZeroMQ: what the bare engine's figures cost on their way to a trainer.

    python -m bench.worker --weights DIR --workload F_t1 grpo [--address ADDRESS] [--device cuda] [--turns continue]

Timed at the client, from the submit to the last trajectory. Without --address it starts workers of its own. Later
turns come from an environment in the worker (bench/environment.py), or by `continue` from here: either way the engine
learns of a turn when the one before it has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from bench.engine import engine_config, kv_bytes
from bench.environment import PLUGIN, forced
from bench.measure import (
    COPY_BANDWIDTH,
    Reads,
    Run,
    by_prefix_cache,
    chosen,
    grown,
    measure,
    parse,
    parser,
    record,
    save,
    table,
)
from bench.report_fields import device_name
from bench.workloads import Job, Workload, jobs
from engine.config import BLOCK_SIZE
from engine.model.config import ModelConfig, read_model_config
from engine.start.build import DTYPES
from rollout.client import AsyncBatch, AsyncRolloutClient, Environment, Group, Trajectory, TurnDone
from rollout.local import local_worker

START_S = 600.0
"""A worker may compile kernels before it is ready."""


class WorkerDriver:
    """Runs workloads through one client. remote: turns are answered from here, else by the worker's environment.

    wait: mean seconds, exponential, that the environment takes for an answer.
    """

    def __init__(self, client: AsyncRolloutClient, remote: bool, wait: float = 0.0) -> None:
        self._client = client
        self._remote = remote
        self._wait = wait

    def __call__(self, workload: Workload, seed: int) -> Run:
        return asyncio.run(self._run(workload, seed))

    def kv_tokens(self) -> int:
        """What the worker's KV pool holds."""
        return int(asyncio.run(self._client.status()).engine["blocks_total"]) * BLOCK_SIZE

    def close(self) -> None:
        asyncio.run(self._client.close())

    async def _run(self, workload: Workload, seed: int) -> Run:
        vocab_size = (await self._client.connect()).model.vocab_size
        found = {_name(workload, seed, job): job for job in jobs(workload, seed)}
        siblings = [list(group) for _, group in groupby(found.values(), key=lambda job: job.group)]
        groups = [self._group(workload, seed, each, vocab_size) for each in siblings]
        before = (await self._client.status()).engine
        gc.collect()
        start = time.perf_counter()
        ended = await self._collect(await self._client.submit(groups), found, vocab_size)
        wall = time.perf_counter() - start
        lengths_ok = len(ended) == len(found) and all(_lengths_ok(t, found[t.trajectory_id]) for t in ended)
        return Run(wall, lengths_ok, grown(before, (await self._client.status()).engine))

    def _group(self, workload: Workload, seed: int, siblings: list[Job], vocab_size: int) -> Group:
        job = siblings[0]
        environment = Environment()
        if len(job.turns) > 1 and self._remote:
            environment = Environment(name="remote")
        elif len(job.turns) > 1:
            environment = forced(siblings, self._wait)
        return self._client.group(
            job.appended(0, vocab_size),
            workload.samples,
            trajectory_ids=[_name(workload, seed, sibling) for sibling in siblings],
            max_tokens=job.turns[0].sampled,
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
            seed=job.seed,
            ignore_eos=True,
            environment=environment,
            on_length="continue",
        )

    async def _collect(self, batch: AsyncBatch, found: dict[str, Job], vocab_size: int) -> list[Trajectory]:
        """All trajectories of the batch; turns that ask for an answer get it meanwhile."""
        ended = []
        async with asyncio.TaskGroup() as answers:
            async for event in batch.events():
                if isinstance(event, Trajectory):
                    ended.append(event)
                else:
                    answers.create_task(self._answer(event, found[event.trajectory_id], vocab_size))
        return ended

    async def _answer(self, turn: TurnDone, job: Job, vocab_size: int) -> None:
        following = turn.turn.index + 1
        if following == len(job.turns):
            await self._client.continue_(turn, done=True)
        else:
            observation = job.appended(following, vocab_size)
            await self._client.continue_(turn, observation=observation, max_tokens=job.turns[following].sampled)


def _name(workload: Workload, seed: int, job: Job) -> str:
    return f"{workload.name}.{seed}.{job.id}"


def _lengths_ok(trajectory: Trajectory, job: Job) -> bool:
    """That a logprob is finite and belongs to a sampled token was checked when the record was read."""
    return trajectory.ok and [turn.length for turn in trajectory.turns] == [turn.sampled for turn in job.turns]


def serve(works: list[Workload], args: argparse.Namespace, model: ModelConfig) -> list[dict[str, Any]]:
    """Measure these workloads on the worker named, or on one that is started for them."""
    # A client that looks at the GPU takes a little of its memory: before the worker plans with what is free.
    bandwidth = COPY_BANDWIDTH.get(device_name(args.device))
    settings: dict[str, Any] = {"turns": args.turns, "wait": args.wait}
    if args.address is not None:
        return _measure(works, args, model, args.address, settings, bandwidth)
    config = engine_config(works, args)
    pool = kv_bytes(args.kv_tokens, works, model, args.dtype, args.device)
    options = asdict(config) | {"kv_memory": pool, "device": args.device, "dtype": args.dtype}
    options |= {"admission": args.admission}
    start = time.perf_counter()
    with local_worker(args.weights, start_timeout=START_S, env=[PLUGIN], log_level="warning", **options) as worker:
        settings |= options | {"start_s": round(time.perf_counter() - start, 2)}
        return _measure(works, args, model, worker.address, settings, bandwidth)


def _measure(
    works: list[Workload],
    args: argparse.Namespace,
    model: ModelConfig,
    address: str,
    settings: dict[str, Any],
    bandwidth: float | None,
) -> list[dict[str, Any]]:
    reads = Reads.of(model, DTYPES[args.dtype].itemsize)
    drive = WorkerDriver(AsyncRolloutClient(address, name="bench"), remote=args.turns == "continue", wait=args.wait)
    settings |= {"kv_tokens": drive.kv_tokens()}
    results = []
    for work in works:
        result = record("rollout-worker", "zmq", work, model, args.device, args.dtype, settings, args.variant)
        result |= measure(work, drive, args.runs, reads, bandwidth, seed=args.seed)
        save(result, args.json_dir)
        results.append(result)
    drive.close()
    return results


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--address", help="of a worker that runs already, on this machine, with these weights")
    options.add_argument("--turns", choices=["environment", "continue"], default="environment", help="who answers")
    options.add_argument("--wait", type=float, default=0.0, help="mean seconds that the environment takes to answer")
    args = parse(options, argv)
    if args.address and (args.kv_tokens or args.max_running):
        options.error("the engine of a worker that runs already is as it is: no --kv-tokens, no --max-running")
    model = read_model_config(args.weights)
    results = [result for works in by_prefix_cache(chosen(args)) for result in serve(works, args, model)]
    print(table(results))


if __name__ == "__main__":
    main()
