"""A `Runner` without a model: the next token is a formula of the KV it reads through the block table.

KV of a position is a running hash of all ids before it and of the weights, so that a wrong block, a missing write, a
stale read, a write into somebody else's block, or a reuse too early changes tokens or raises. The pool starts as
poison, and blocks that become free without a name are poisoned again.

lazy=True is the other end of what a device may do: a step runs only when it is waited for, in order, and reads its
plan and `last_token` then. The arrays of a result are overwritten as soon as the next result is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from engine.config import BLOCK_SIZE
from engine.errors import WeightsError
from engine.request import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.step import EMPTY_SUPPORT, NONFINITE, SlotStart, StepOutput, StepPlan, WeightsInfo

POISON = np.int64(-0x7E57_7E57_7E57)
Script = Callable[[SamplingParams, int], int | None]


MASK = 2**64 - 1


def mix(*values: int) -> int:
    """A 64-bit hash of integers."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value & MASK)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 29)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 32)


def mix_each(values: np.ndarray, salt: int, first: int) -> np.ndarray:
    """int64[n]: a hash of each value with its index, counted from `first`."""
    index = np.arange(first, first + len(values)).astype(np.uint64)
    state = (values.astype(np.uint64) ^ np.uint64(mix(salt))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(29)) ^ index) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(32))).astype(np.int64)


def counts_of(token_ids: np.ndarray, kind: int) -> int:
    """Which ids occurred how often, in no order, as one number."""
    return sum(mix(token_id, kind) for token_id in token_ids.tolist())


@dataclass
class SlotState:
    """What the device keeps per slot. counts: a hash of the ids that penalties see."""

    start: SlotStart
    counts: int


@dataclass(frozen=True)
class Sampled:
    token_id: int
    flags: int
    logprob: float
    top_ids: list[int]


class FakeRunner:
    """See the module's text.

    script: (params, position) -> id to be sampled for that position, or None for the formula.
    bad_id, empty_id: rows whose context holds it are flagged NONFINITE, EMPTY_SUPPORT.
    weights: stands for the weights; part of all KV and tokens.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        vocab_size: int = 512,
        num_slots: int = 64,
        lazy: bool = False,
        script: Script = lambda _params, _position: None,
        bad_id: int = -1,
        empty_id: int = -1,
    ) -> None:
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.lazy = lazy
        self.script = script
        self.weights = 0
        self.kv = np.full((num_blocks, BLOCK_SIZE), POISON)
        self.flags = np.zeros((num_blocks, BLOCK_SIZE), np.uint8)
        self.last_token = np.full(num_slots, -1, np.int64)
        self.plans: list[StepPlan] = []
        self.max_in_flight = 0
        self._special = {bad_id: NONFINITE, empty_id: EMPTY_SUPPORT}
        self._slots: dict[int, SlotState] = {}
        self._pending: deque[FakeTicket] = deque()
        self._pool: BlockPool | None = None
        self._last_output: StepOutput | None = None
        self.events: list[tuple[str, int]] = []

    def watch(self, pool: BlockPool) -> None:
        """From now on raise when a step touches a block that nobody holds, or writes one that is shared or named."""
        self._pool = pool

    def launch(self, plan: StepPlan) -> FakeTicket:
        ticket = FakeTicket(self, plan)
        self.events.append(("launch", plan.step))
        self.plans.append(plan)
        self._check(plan)
        self._pending.append(ticket)
        self.max_in_flight = max(self.max_in_flight, len(self._pending))
        if not self.lazy:
            ticket.result = self._run(plan)
        return ticket

    def finish(self, ticket: FakeTicket) -> StepOutput:
        plan = ticket.plan
        assert self._pending.popleft() is ticket, "waited for out of launch order, or twice"
        self.events.append(("wait", plan.step))
        self._check(plan)
        for name, value in ticket.frozen.items():
            assert np.array_equal(getattr(plan, name), value), f"plan.{name} was written after its launch"
        self._overwrite(self._last_output)
        output = self._last_output = self._run(plan) if ticket.result is None else ticket.result
        return output

    def _check(self, plan: StepPlan) -> None:
        """The plan's own rules, and those of the blocks it names, while it is in flight."""
        rows = plan.num_rows
        assert rows > 0
        assert len(set(plan.slots.tolist())) == rows, "a slot has two rows"
        assert (plan.query_lens[: plan.num_decode] == 1).all()
        assert int(plan.query_lens[plan.num_decode :].sum()) == len(plan.token_ids)
        covered = -(-(plan.context_lens + plan.query_lens) // BLOCK_SIZE)
        assert np.array_equal(np.diff(plan.block_indptr), covered)
        written: list[int] = []
        for row in range(rows):
            blocks = plan.block_ids[plan.block_indptr[row] : plan.block_indptr[row + 1]].tolist()
            written += blocks[plan.context_lens[row] // BLOCK_SIZE :]
            assert 0 not in blocks, "the dummy block was handed out"
            if self._pool is not None:
                assert self._pool.references(blocks).all(), "a block of a step in flight is free"
        assert len(set(written)) == len(written), "two rows write one block"
        if self._pool is not None:
            for block in written:
                assert self._pool.references([block]) == 1, f"a step writes the shared block {block}"
                assert self._pool.key(block) is None, f"a step writes the published block {block}"

    def _run(self, plan: StepPlan) -> StepOutput:
        self._poison()
        for start in plan.starts:
            counts = counts_of(start.token_ids, 1) + counts_of(start.token_ids[start.sampled], 2)
            self._slots[start.slot] = SlotState(start, counts)
        sampled: list[Sampled] = []
        scores, wanted = [], {score.row: score.targets for score in plan.scores}
        ends = np.cumsum(plan.query_lens[plan.num_decode :])
        for row in range(plan.num_rows):
            slot = int(plan.slots[row])
            if row < plan.num_decode:
                ids = self.last_token[slot : slot + 1]
            else:
                end = int(ends[row - plan.num_decode])
                ids = plan.token_ids[end - plan.query_lens[row] : end].astype(np.int64)
            seen, flags = self._forward(plan, row, ids)
            if row in wanted:
                pairs = zip(seen.tolist(), wanted[row].tolist(), strict=True)
                each = np.array([logprob(h, t) if t >= 0 else np.nan for h, t in pairs], np.float32)
                scores.append(np.stack((each, each - 1, each - 2)))
            if plan.samples[row]:
                position = int(plan.context_lens[row] + plan.query_lens[row])
                sampled.append(self._sample(slot, position, int(seen[-1]), int(flags[-1])))
        return output_of(sampled, scores)

    def _forward(self, plan: StepPlan, row: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write the row's KV, then read all of its context: int64[q], what each query position saw; its flags."""
        blocks = plan.block_ids[plan.block_indptr[row] : plan.block_indptr[row + 1]]
        context = int(plan.context_lens[row])
        end = context + len(ids)
        assert ids.min() >= 0, "a token that was never sampled is read"
        kv, flags = self.kv[blocks].ravel(), self.flags[blocks].ravel()
        before = kv[context - 1] if context else np.int64(0)
        kv[context:end] = before + np.cumsum(mix_each(ids, self.weights, context))
        special = np.array([self._special.get(i, 0) for i in ids.tolist()], np.uint8)
        flags[context:end] = np.bitwise_or.accumulate(special) | (flags[context - 1] if context else 0)
        positions = np.arange(context, end)
        at = blocks[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        self.kv[at], self.flags[at] = kv[context:end], flags[context:end]
        assert (kv[:end] != POISON).all(), "KV that was never written is read"
        return np.cumsum(mix_each(kv[:end], 0, 0))[context:], flags[context:end]

    def _sample(self, slot: int, position: int, seen: int, flags: int) -> Sampled:
        """The id goes into `last_token` and into the slot's counts."""
        state = self._slots[slot]
        params = state.start.params
        noise = 0 if params.temperature == 0 else mix(params.seed, params.sample_index, params.segment, position)
        counts = state.counts if params.has_penalties else 0
        scripted = self.script(params, position)
        token = mix(seen, noise, counts) % self.vocab_size if scripted is None else scripted
        if flags:
            token = 0
        self.last_token[slot] = token
        state.counts += mix(token, 1) + mix(token, 2)
        top_ids = [(token + i) % self.vocab_size for i in range(state.start.top_logprobs)]
        return Sampled(token, flags, np.nan if flags else logprob(seen, token), top_ids)

    @staticmethod
    def _overwrite(output: StepOutput | None) -> None:
        if output is not None:
            for array in (output.token_ids, output.logprobs, output.flags, output.top_ids, output.top_logprobs):
                if array is not None:
                    array.fill(77)
            for scores in output.scores:
                scores.fill(77)

    def _poison(self) -> None:
        """Nobody may count on a free block that has no name."""
        if self._pool is not None:
            unheld = (self._pool.references(range(self.num_blocks)) == 0).nonzero()[0]
            free = [block for block in unheld.tolist() if block and not self._pool.key(block)]
            self.kv[free] = POISON


def logprob(seen: int, token_id: int) -> float:
    return -(mix(seen, token_id) % 4096) / 1024


def output_of(sampled: list[Sampled], scores: list[np.ndarray]) -> StepOutput:
    logprobs = np.array([row.logprob for row in sampled], np.float32)
    width = max((len(row.top_ids) for row in sampled), default=0)
    top_ids = np.array([row.top_ids + [0] * (width - len(row.top_ids)) for row in sampled], np.int32)
    return StepOutput(
        token_ids=np.array([row.token_id for row in sampled], np.int32),
        logprobs=np.stack((logprobs, logprobs - 1, logprobs - 2)),
        flags=np.array([row.flags for row in sampled], np.uint8),
        top_ids=top_ids if width else None,
        top_logprobs=logprobs[:, None] - np.arange(width, dtype=np.float32) if width else None,
        scores=tuple(scores),
    )


class FakeTicket:
    """Holds a copy of the plan's arrays, to see that nobody writes them while the step is in flight."""

    def __init__(self, runner: FakeRunner, plan: StepPlan) -> None:
        self.plan = plan
        self.result: StepOutput | None = None
        arrays = {f.name: getattr(plan, f.name) for f in fields(plan)}
        self.frozen = {name: value.copy() for name, value in arrays.items() if isinstance(value, np.ndarray)}
        self._runner = runner

    def wait(self) -> StepOutput:
        return self._runner.finish(self)


class FakeWeights:
    """A `WeightStore` whose checkpoints are numbers: path "7" becomes `runner.weights = 7`."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.prepared: int | None = None
        self.before_prepare: Callable[[], object] = lambda: None

    @property
    def digest(self) -> str:
        return f"fake:{self.runner.weights}"

    def prepare(self, path: str, version: int, checksums: dict[str, str] | None) -> WeightsInfo:
        assert checksums is None
        self.before_prepare()
        if not path.isdigit():
            raise WeightsError(f"{path} is no checkpoint", field="path")
        self.prepared = int(path)
        return WeightsInfo(version=version, digest=f"fake:{path}", nbytes=8, seconds=0.0)

    def commit(self) -> None:
        assert self.prepared is not None
        self.runner.weights, self.prepared = self.prepared, None

    def discard(self) -> None:
        self.prepared = None
