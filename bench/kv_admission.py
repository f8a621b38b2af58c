"""What whole-trajectory admission is worth, counted without a model: prompt tokens computed twice, and steps.

    python -m bench.kv_admission [--workload code_localization] [--kv-tokens 870704] [--samples 8] [--wait 0]

The real scheduler, block pool, engine loop and budget over a runner that answers at once. Its time is a model: a step
costs a constant, so much a prefilled token and so much a token of context read. `--wait`: mean seconds, exponential,
between turns. The first "whole" run knows nothing of lengths yet, the second what the first has learned.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass, replace

from bench.feed import Feed, Trajectory
from bench.scheduler import VOCAB, InstantRunner, InstantTicket
from bench.workloads import Workload, jobs, workloads
from engine.config import BLOCK_SIZE, EngineConfig
from engine.engine import Engine
from engine.handle import EngineStats
from engine.step import StepPlan
from rollout.generation.kv_budget import KvBudget

STEP_S = 0.0035
"""Seconds of a step that reads no KV: about what Qwen3-4B takes on an H200."""
PREFILL_TOKENS_S = 48_000
"""Likewise, of prompts of several thousand tokens."""
KV_TOKENS_S = 28_000_000
"""Likewise, tokens of context that decode rows read."""


class ModelledRunner(InstantRunner):
    """Answers at once, and says how long a device would have taken."""

    def __init__(self, num_blocks: int, max_rows: int) -> None:
        super().__init__(num_blocks, max_rows)
        self.now = 0.0

    def launch(self, plan: StepPlan) -> InstantTicket:
        read = int(plan.context_lens[: plan.num_decode].sum())
        self.now += STEP_S + len(plan.token_ids) / PREFILL_TOKENS_S + read / KV_TOKENS_S
        return super().launch(plan)


@dataclass(frozen=True, slots=True)
class Outcome:
    """new: prompt tokens that were new to their trajectory, a prompt that siblings share counted once.

    lengths_ok: every turn was as long as asked for.
    """

    stats: EngineStats
    new: int
    seconds: float
    lengths_ok: bool

    @property
    def computed_twice(self) -> float:
        """Prompt tokens computed beyond the new ones, as a share of those; last blocks that were not full included."""
        return self.stats.computed_prompt_tokens_total / self.new - 1


def simulate(
    workload: Workload, kv_tokens: int, kv: KvBudget | None, *, seed: int = 0, wait: float = 0.0, holds: bool = True
) -> Outcome:
    """One run. kv: None starts everything at once. holds: trajectories between turns hold their KV."""
    rows = workload.concurrency
    runner = ModelledRunner(1 + kv_tokens // BLOCK_SIZE, rows)
    config = EngineConfig(max_running=rows, max_step_tokens=16384, max_context=workload.longest + BLOCK_SIZE)
    engine = Engine(runner, config, clock=lambda: runner.now)
    chance = random.Random(seed)
    trajectories = [Trajectory(workload, job, order, VOCAB) for order, job in enumerate(jobs(workload, seed))]
    feed = Feed(engine, trajectories, kv, wait)
    away: list[tuple[float, int, Trajectory]] = []
    while True:
        while away and away[0][0] <= runner.now:
            feed.come_back(heapq.heappop(away)[2])
        feed.fill()
        if feed.over:
            break
        if not engine.has_work:
            runner.now = away[0][0]
            continue
        for completion in engine.step():
            if (trajectory := feed.take(completion)) is not None:
                back = runner.now + (chance.expovariate(1 / wait) if wait else 0.0)
                heapq.heappush(away, (back, trajectory.order, trajectory))
            if not holds:
                engine.release_kv((completion.request_id,))
    assert engine.stats().blocks_used == 0
    new = sum(t.new_tokens for t in trajectories)
    new -= sum(turns[0].appended for turns in workload.groups) * (workload.samples - 1)
    return Outcome(engine.stats(), new, runner.now, all(t.lengths_ok for t in trajectories))


def line(name: str, outcome: Outcome) -> str:
    stats = outcome.stats
    return (
        f"{name:24} {outcome.computed_twice:9.1%} {stats.computed_prompt_tokens_total:12,} {stats.steps_total:7,} "
        f"{stats.kv_holds_dropped_total:8} {stats.preemptions_total:8} {outcome.seconds:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = [name for name, work in workloads().items() if work.prefix_cache]
    parser.add_argument("--workload", choices=several, default="code_localization")
    parser.add_argument("--kv-tokens", type=int, default=870_704, help="by default what vLLM has on an H200")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--wait", type=float, default=0.0, help="mean seconds between turns")
    args = parser.parse_args()
    work = replace(workloads()[args.workload], samples=args.samples)
    print(f"{'':24} {'twice':>9} {'computed':>12} {'steps':>7} {'dropped':>8} {'preempt':>8} {'seconds':>9}")
    print(line("open, nothing held", simulate(work, args.kv_tokens, None, wait=args.wait, holds=False)))
    print(line("open", simulate(work, args.kv_tokens, None, wait=args.wait)))
    kv = KvBudget(args.kv_tokens)
    for number, name in enumerate(("whole, nothing known", "whole")):
        print(line(name, simulate(work, args.kv_tokens, kv, seed=number, wait=args.wait)))


if __name__ == "__main__":
    main()
