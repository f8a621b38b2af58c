"""Workloads on the bare engine: no worker, no wire, the loop of this file and nothing else.

    python -m bench.engine --weights DIR --workload A B [--device cuda] [--runs 3] [--json-dir DIR]

Everything is submitted at once; a trajectory's next turn is added when its last one has ended. Trajectories of several
turns start as the worker starts them (`--admission whole`): what one run learns of their lengths, the next one knows.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from bench.feed import Feed, Trajectory
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
from bench.workloads import Workload, jobs
from engine.config import BLOCK_SIZE, EngineConfig
from engine.engine import Engine
from engine.memory.kv_size import kv_bytes_per_block
from engine.model.config import ModelConfig, read_model_config
from engine.start.build import DTYPES, load_engine
from rollout.generation.kv_budget import KvBudget


def run(
    engine: Engine, vocab_size: int, shuffled: bool, workload: Workload, seed: int, *, kv: KvBudget | None = None
) -> Run:
    """One run. shuffled: siblings are not neighbours, neither in the queue nor in the batch. kv: who may start when."""
    submitted = jobs(workload, seed)
    if shuffled:
        random.Random(seed).shuffle(submitted)
    trajectories = [Trajectory(workload, job, order, vocab_size) for order, job in enumerate(submitted)]
    feed = Feed(engine, trajectories, kv)
    before = asdict(engine.stats())
    gc.collect()
    start = time.perf_counter()
    feed.fill()
    while not feed.over:
        ended = engine.step()
        for completion in ended:
            if (trajectory := feed.take(completion)) is not None:
                feed.come_back(trajectory)
        if ended:
            feed.fill()
    wall = time.perf_counter() - start
    counters = grown(before, asdict(engine.stats()))
    return Run(wall, all(trajectory.lengths_ok for trajectory in trajectories), counters)


def engine_config(works: list[Workload], args: argparse.Namespace) -> EngineConfig:
    """What all of these workloads need, and what was asked for."""
    return EngineConfig(
        max_running=args.max_running or max(work.concurrency for work in works),
        max_step_tokens=args.max_step_tokens,
        max_context=max(work.longest for work in works) + BLOCK_SIZE,
        prefix_cache=works[0].prefix_cache,
    )


def kv_bytes(tokens: int | None, works: list[Workload], model: ModelConfig, dtype: str, device: str) -> int | None:
    """As asked for; else what the largest workload needs, or on a GPU None: the engine takes what it can use."""
    if tokens is None and device == "cuda":
        return None
    # A request may hold one block that is not full, and one more while a step is in flight.
    needed = max(work.kv_tokens // BLOCK_SIZE + 2 * work.concurrency for work in works)
    blocks = needed if tokens is None else tokens // BLOCK_SIZE
    return kv_bytes_per_block(model, DTYPES[dtype].itemsize) * (1 + blocks)


def serve(works: list[Workload], args: argparse.Namespace, model: ModelConfig) -> list[dict[str, Any]]:
    """Load one engine for these workloads and measure them; each result is written as soon as it is there."""
    config = engine_config(works, args)
    pool = kv_bytes(args.kv_tokens, works, model, args.dtype, args.device)
    start = time.perf_counter()
    loaded = load_engine(
        args.weights, config, dtype=args.dtype, device=args.device, kv_bytes=pool, decode_path=args.decode_path
    )
    load_s = round(time.perf_counter() - start, 2)
    kv_tokens = (loaded.kv.num_blocks - 1) * BLOCK_SIZE
    print(f"loaded in {load_s} s: {config}, KV of {kv_tokens} tokens", flush=True)
    settings = asdict(config) | {"kv_tokens": kv_tokens, "load_s": load_s}
    settings |= {"decode_path": args.decode_path, "shuffled": args.shuffled, "admission": args.admission}
    whole = args.admission == "whole" and config.prefix_cache
    kv = KvBudget(kv_tokens) if whole else None
    drive = partial(run, loaded.engine, model.vocab_size, args.shuffled, kv=kv)
    reads = Reads.of(model, DTYPES[args.dtype].itemsize)
    bandwidth = COPY_BANDWIDTH.get(device_name(args.device))
    results = []
    for work in works:
        result = record("rollout-worker", "bare", work, model, args.device, args.dtype, settings, args.variant)
        result |= measure(work, drive, args.runs, reads, bandwidth, seed=args.seed)
        save(result, args.json_dir)
        results.append(result)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--decode-path", choices=["graph", "eager"], default="graph", help="of steps on a GPU")
    options.add_argument("--shuffled", action="store_true", help="submit siblings apart from each other")
    args = parse(options, argv)
    model = read_model_config(args.weights)
    results = []
    for works in by_prefix_cache(chosen(args)):
        results += serve(works, args, model)
        gc.collect()  # an engine is a ring of references: its pool must be free before the next one's
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(table(results))


if __name__ == "__main__":
    main()
