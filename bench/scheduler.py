"""CPU time of the host side of a step: scheduler, block pool, slots and engine loop, with no runner.

    python -m bench.scheduler [--rows 64 256 1024] [--context 1024] [--steps 400] [--json]

decode: rows that neither come nor go. Their prompts have mixed lengths from half the context on, so that they cross
block boundaries at different steps.

turns: as many trajectories, whose turns sample 128 tokens each. One that ends a turn is back at once with 64 new ones,
or after four turns another one begins. At 256 rows two turns end and two begin every step, with all that belongs to
it: checks, prefix hits, hashing, holds, evictions, completions.

The runner answers at once with ids made beforehand, so that what is timed is ours alone. A machine whose speed swings
gives other microseconds from one minute to the next, so a fixed loop of plain Python takes turns with the steps:
`yardsticks` is the time of a step over that of the loop. It swings less, but it does: a step waits for memory too.
Instructions do not swing: a tool that counts them (valgrind --tool=cachegrind), over two runs that differ in --steps
alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Completion, Request, SamplingParams, StopRule
from engine.step import StepOutput, StepPlan

VOCAB = 151936
STOP_IDS = frozenset({151643, 151645})
TURN, OBSERVATION, TURNS = 128, 64, 4
STEPS_A_YARDSTICK = 10

Work = Literal["decode", "turns"]


class InstantRunner:
    """Results of every step are the first rows of one ready-made answer without a stop id."""

    vocab_size = VOCAB

    def __init__(self, num_blocks: int, max_rows: int) -> None:
        self.num_blocks = num_blocks
        ids = np.random.default_rng(0).integers(0, 150_000, max_rows, np.int32)
        self._answer = StepOutput(ids, np.zeros((3, max_rows), np.float32), np.zeros(max_rows, np.uint8))

    def launch(self, plan: StepPlan) -> InstantTicket:
        return InstantTicket(self._answer, int(np.count_nonzero(plan.samples)))


class InstantTicket:
    def __init__(self, answer: StepOutput, count: int) -> None:
        self._answer = answer
        self._count = count

    def wait(self) -> StepOutput:
        a, n = self._answer, self._count
        return StepOutput(a.token_ids[:n], a.logprobs[:, :n], a.flags[:n])


class Trajectories:
    """As many at once as there are rows; no two have ids in common."""

    def __init__(self, rows: int, context: int, sampled: int) -> None:
        self._rng = np.random.default_rng(1)
        self._prompts = [context // 2 + i * (context // 2) // rows for i in range(rows)]
        self._sampled = sampled
        self._turns: dict[str, int] = {}
        self._ids: dict[str, np.ndarray] = {}
        self._began = 0

    def begin(self, sampled: int) -> Request:
        number = self._began
        self._began += 1
        return self._turn(str(number), self._new(self._prompts[number % len(self._prompts)]), sampled, 0)

    def after(self, completion: Completion) -> Request:
        """The next turn of the one that has ended one, or another's first."""
        assert completion.finish_reason == "length"
        name = completion.request_id
        ids, turn = self._ids.pop(name), self._turns.pop(name) + 1
        if turn == TURNS:
            return self.begin(self._sampled)
        return self._turn(
            name, np.concatenate((ids, completion.token_ids, self._new(OBSERVATION))), self._sampled, turn
        )

    def _turn(self, name: str, ids: np.ndarray, sampled: int, turn: int) -> Request:
        self._turns[name], self._ids[name] = turn, ids
        return Request(
            name,
            ids,
            sampled,
            params=SamplingParams(seed=int(name)),
            stop=StopRule(ids=STOP_IDS),
            order=int(name),
            trajectory=name,
            goes_on=turn + 1 < TURNS,
        )

    def _new(self, count: int) -> np.ndarray:
        return self._rng.integers(0, 150_000, count, np.int32)


def yardstick() -> int:
    """Plain Python of fixed length: calls, attributes, dictionaries and small numbers; some 100 us."""
    seen: dict[int, int] = {}
    for i in range(1000):
        seen[i & 63] = seen.get(i & 63, 0) + len(str(i))
    return len(seen)


@dataclass(frozen=True)
class Result:
    """Microseconds are CPU time of the thread a step."""

    work: Work
    rows: int
    context: int
    steps: int
    mean_us: float
    median_us: float
    p99_us: float
    us_per_row: float
    yardsticks: float


def measure(work: Work, rows: int, context: int, steps: int) -> Result:
    """The first steps (prefill, first touch of arrays; of turns, until every trajectory is another) are not timed."""
    sampled, unmeasured = (2 * steps + 64, 64) if work == "decode" else (TURN, TURN * TURNS)
    config = EngineConfig(
        max_running=rows,
        max_step_tokens=max(16384, rows),
        max_context=context + (sampled if work == "decode" else TURNS * (TURN + OBSERVATION)),
    )
    engine = Engine(InstantRunner(1 + rows * (config.max_blocks_per_request + 1), rows), config)
    trajectories = Trajectories(rows, context, sampled)
    ready = [trajectories.begin(sampled if work == "decode" else 1 + i * TURN // rows) for i in range(rows)]
    times, sticks = [], []
    for step in range(-unmeasured, steps):
        start = time.thread_time_ns()
        for request in ready:
            engine.add(request)
        ended = engine.step()
        times.append(time.thread_time_ns() - start)
        ready = [trajectories.after(completion) for completion in ended]
        if step % STEPS_A_YARDSTICK == 0:
            start = time.thread_time_ns()
            yardstick()
            sticks.append(time.thread_time_ns() - start)
    assert engine.stats().running + len(ready) == rows
    us = np.array(times[unmeasured:]) / 1000
    mean, stick = float(us.mean()), statistics.median(sticks) / 1000
    return Result(
        work, rows, context, steps, mean, float(np.median(us)), float(np.percentile(us, 99)), mean / rows, mean / stick
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the engine's host side per step")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    args = parser.parse_args()
    works: tuple[Work, ...] = ("decode", "turns")
    results = [measure(work, rows, args.context, args.steps) for work in works for rows in args.rows]
    if args.json:
        for result in results:
            print(json.dumps(asdict(result)))
        return
    print(
        f"{'work':8}{'rows':>6} {'context':>8} {'mean us':>9} {'median':>9} {'p99':>9} {'us/row':>8} {'yardsticks':>11}"
    )
    for r in results:
        print(
            f"{r.work:8}{r.rows:>6} {r.context:>8} {r.mean_us:>9.1f} {r.median_us:>9.1f} {r.p99_us:>9.1f} "
            f"{r.us_per_row:>8.3f} {r.yardsticks:>11.2f}"
        )


if __name__ == "__main__":
    main()
