"""CPU time of the host side of a decode step: scheduler, block pool, slots and engine loop, with no runner.

    python -m bench.scheduler [--rows 64 256 1024] [--context 1024] [--steps 400] [--json]

The runner answers at once with ids made beforehand, so that what is timed is ours alone. Rows have prompts of
mixed lengths around half the context, hence cross block boundaries (allocate, hash, publish) at different steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from engine.config import BLOCK_SIZE, EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams, StopRule
from engine.step import StepOutput, StepPlan

VOCAB = 151936
STOP_IDS = frozenset({151643, 151645})


class InstantRunner:
    """Results of every step are the first rows of one ready-made answer without a stop id."""

    vocab_size = VOCAB

    def __init__(self, num_blocks: int, max_rows: int) -> None:
        self.num_blocks = num_blocks
        ids = np.random.default_rng(0).integers(0, 150_000, max_rows, np.int32)
        self._answer = StepOutput(ids, np.zeros((3, max_rows), np.float32), np.zeros(max_rows, np.uint8))
        self._samples = 0

    def launch(self, plan: StepPlan) -> InstantTicket:
        return InstantTicket(self._answer, int(plan.samples.sum()))


class InstantTicket:
    def __init__(self, answer: StepOutput, count: int) -> None:
        self._answer = answer
        self._count = count

    def wait(self) -> StepOutput:
        a, n = self._answer, self._count
        return StepOutput(a.token_ids[:n], a.logprobs[:, :n], a.flags[:n])


@dataclass(frozen=True)
class Result:
    rows: int
    context: int
    steps: int
    mean_us: float
    median_us: float
    p99_us: float
    us_per_row: float


def measure(rows: int, context: int, steps: int) -> Result:
    """Decode steps of `rows` running requests; the first steps (prefill, first touch of arrays) are not timed."""
    config = EngineConfig(max_running=rows, max_step_tokens=max(16384, rows), max_context=context + 2 * steps)
    num_blocks = 1 + rows * (config.max_blocks_per_request + 1)
    engine = Engine(InstantRunner(num_blocks, rows), config)
    rng = np.random.default_rng(1)
    for i in range(rows):
        length = context // 2 + i * (context // 2) // rows
        ids = rng.integers(0, 150_000, length, np.int32)
        engine.add(Request(str(i), ids, 2 * steps, params=SamplingParams(seed=i), stop=StopRule(ids=STOP_IDS)))
    while engine.stats().waiting or engine.stats().sampled_tokens_total < rows * 2 * BLOCK_SIZE:
        engine.step()
    seconds = []
    for _ in range(steps):
        start = time.thread_time_ns()
        engine.step()
        seconds.append((time.thread_time_ns() - start) / 1000)
    assert engine.stats().running == rows
    mean = statistics.fmean(seconds)
    p99 = float(np.percentile(seconds, 99))
    return Result(rows, context, steps, mean, statistics.median(seconds), p99, mean / rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the engine's host side per decode step")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    args = parser.parse_args()
    results = [measure(rows, args.context, args.steps) for rows in args.rows]
    if args.json:
        for result in results:
            print(json.dumps(asdict(result)))
        return
    print(f"{'rows':>6} {'context':>8} {'mean us':>9} {'median':>9} {'p99':>9} {'us/row':>8}")
    for r in results:
        print(f"{r.rows:>6} {r.context:>8} {r.mean_us:>9.1f} {r.median_us:>9.1f} {r.p99_us:>9.1f} {r.us_per_row:>8.3f}")


if __name__ == "__main__":
    main()
